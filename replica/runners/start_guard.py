"""What the end of another rank does to rank 0: it is an error of its start, and later the process's end.

Who starts a replica reads the error that its start raises. So a rank that is lost meanwhile is raised by
whoever loads or warms up, which notices it in the next collective, in the one where it waits, or at the end.
What does not come back from there ends as a replica that serves: the log has said why. So each loss is either
raised or ends the process. Knows threads; knows no models.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from replica.errors import RankLost

logger = logging.getLogger(__name__)

RETURN_LIMIT_S = 60.0  # to notice, once ranks have met: cutting a large model takes long, and asks nobody


class StartGuard:
    """Rank 0's thread says how far it is; a thread of the followers' calls `lost`."""

    def __init__(self, on_lost: Callable[[], None], *, limit_s: float = RETURN_LIMIT_S) -> None:
        """on_lost: called on another thread, at once in a replica that serves."""
        self._on_lost = on_lost
        self._limit_s = limit_s
        self._abort: Callable[[], None] = _nothing
        self._is_meeting = threading.Event()  # or has ended: nobody waits for it for good
        self._has_ended = threading.Event()
        self._lock = threading.Lock()  # guards the next two
        self._serves = False  # or would, but for a rank that was lost before
        self._lost: RankLost | None = None

    def meets(self, abort: Callable[[], None]) -> None:
        """From now on it may wait for other ranks. abort: ends such a wait for one that has gone; called on a
        thread of its own, since it may hang."""
        self._abort = abort
        self._is_meeting.set()

    def serves(self) -> None:
        """It has started. Raises the rank that was lost before, which ends nothing then. Idempotent."""
        with self._lock:
            self._serves = True
        if self._lost is not None:
            self.end()
            raise self._lost

    def end(self) -> None:
        """Nobody has to be told any more. Idempotent."""
        self._has_ended.set()
        self._is_meeting.set()

    def lost(self, lost: RankLost) -> None:
        """The log has said so. Waits for nothing while it starts."""
        with self._lock:
            if not self._serves:
                self._lost = lost
        if self._lost is None:
            self._on_lost()
        else:
            _in_background(self._bring_back)

    def _bring_back(self) -> None:
        self._is_meeting.wait()
        if self._has_ended.is_set():
            return
        _in_background(self._abort)
        if not self._has_ended.wait(self._limit_s):
            logger.critical(
                "the start does not come back from waiting for a rank that has gone",
                extra={"limit_s": self._limit_s},
            )
            self._on_lost()


def _in_background(act: Callable[[], None]) -> None:
    threading.Thread(target=act, name="warmpath-start-guard", daemon=True).start()


def _nothing() -> None:
    pass
