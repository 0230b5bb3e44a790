"""Ends the process when the engine thread has been busy with one thing for too long.

A hung forward cannot be interrupted from Python, and a replica that accepts requests and never answers
is worse than a dead one: Serve acts on a dead actor at once. While the whole process is stopped (a debugger,
a frozen container) nothing can make progress, and nothing is held against it.
Knows threads and clocks; knows no steps.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from replica.polling import Poller

logger = logging.getLogger(__name__)

EXIT_CODE = 70  # EX_SOFTWARE
MAX_NAMED = 256  # requests in the line that says why the process ends
TELL_LIMIT_S = 2.0  # that its last words may take


@dataclass(frozen=True, slots=True)
class _Task:
    name: str
    began_s: float
    limit_s: float
    stopped_s: float  # of the process before it began
    involved: Callable[[], Sequence[str]]


class Watchdog:
    """The watched thread says `begin` and `end`; a thread of its own, or a test, calls `check`."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        poll_interval_s: float,
        on_hang: Callable[[], None] | None = None,
    ) -> None:
        """on_hang: what to do after logging, once; by default the process ends with EXIT_CODE."""
        self._clock = clock
        self._poll_interval_s = poll_interval_s
        self._on_hang = on_hang if on_hang is not None else end_process
        self._task: _Task | None = None  # replaced whole, so that no lock is needed
        self._watched_thread: int | None = None
        self._has_fired = False
        self._stopped_s = 0.0  # that this process did not run, as far as its own lateness tells
        self._looked_s = clock()
        self._poller = Poller("warmpath-watchdog", poll_interval_s, self._look)

    def start(self) -> None:
        self._looked_s = self._clock()
        self._poller.start()

    def close(self) -> None:
        """Stop watching. May be called twice, and before `start`."""
        self._poller.close()

    def begin(self, name: str, limit_s: float, involved: Callable[[], Sequence[str]] = tuple) -> None:
        """The calling thread starts something that must end within limit_s.

        involved: ids of the requests that end with it, asked from the watchdog's thread if it hangs.
        """
        self._watched_thread = threading.get_ident()
        self._task = _Task(name, self._clock(), limit_s, self._stopped_s, involved)

    def end(self) -> None:
        self._task = None

    def check(self) -> bool:
        """Whether the present task has run over its limit; acts on that the first time."""
        task = self._task
        if task is None or self._has_fired:
            return self._has_fired
        busy_s = self._clock() - task.began_s - (self._stopped_s - task.stopped_s)
        if busy_s <= task.limit_s:
            return False
        self._has_fired = True
        try:
            request_ids = list(task.involved())[:MAX_NAMED]
            _try(lambda: self._tell(task, busy_s, request_ids))
        finally:  # whether or not it could be told
            self._on_hang()
        return True

    def _tell(self, task: _Task, busy_s: float, request_ids: Sequence[str]) -> None:
        logger.critical(
            "engine thread is stuck, ending the process\n%s",
            self._stack(),
            extra={
                "task": task.name,
                "busy_s": round(busy_s, 3),
                "limit_s": task.limit_s,
                "request_ids": request_ids,
            },
        )

    def _look(self) -> None:
        self.note_lateness(self._clock() - self._looked_s - self._poll_interval_s)
        self._looked_s = self._clock()
        self.check()

    def note_lateness(self, late_s: float) -> None:
        """The watchdog itself got its turn so much later than it asked for."""
        if late_s > self._poll_interval_s:
            self._stopped_s += late_s

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._watched_thread or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "(its stack is gone)"


def end_process() -> None:
    """At once, with what was logged written: Serve replaces a process that has gone, and knows it at once."""
    _try(logging.shutdown)  # flush what explains the death; os._exit flushes nothing
    os._exit(EXIT_CODE)


def _try(last_words: Callable[[], None]) -> None:
    """Say them, and wait no longer than they may take: what hangs may hang in a line of its own, a log that
    nobody reads for instance, and then has the lock that every other line waits for."""
    thread = threading.Thread(target=last_words, name="warmpath-last-words", daemon=True)
    thread.start()
    thread.join(TELL_LIMIT_S)
