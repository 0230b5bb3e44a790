"""A thread that looks at something again and again, until it is told to stop.

Knows threads; knows nothing of what it looks at.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Poller:
    """Calls `look` every `interval_s` from `start` to `close`, whether it raises or not."""

    def __init__(self, name: str, interval_s: float, look: Callable[[], object]) -> None:
        """name: the thread's."""
        self._interval_s = interval_s
        self._look = look
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._has_failed = False  # the latest look: one that fails again and again is told of once

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Look no more. May be called twice, before `start`, and by `look` itself."""
        self._closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            try:
                self._look()
                self._has_failed = False
            except Exception:
                # Nobody would miss a thread that has ended, until what it watches for happens.
                if not self._has_failed:
                    logger.exception(
                        "a look failed; the next one is taken all the same",
                        extra={"thread_name": self._thread.name},
                    )
                self._has_failed = True
