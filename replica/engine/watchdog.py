"""Ends the process when the engine thread has been busy with one thing for too long.

A hung forward cannot be interrupted from Python, and a replica that accepts requests and never answers
is worse than a dead one: Serve acts on a dead actor at once. While the whole process is stopped (a debugger,
a frozen container) nothing can make progress, and while others have the processors little can: neither is
held against it.
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
from pathlib import Path

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
    idle_s: float  # without a processor, before it began
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
        self._watched_thread: int | None = None  # as Python calls it
        self._watched_native_id = 0  # and as the system does
        self._has_fired = False
        self._idle_s = 0.0  # that the watched thread could not run, as far as was seen
        self._looked_s = clock()
        self._waiting = (0, 0.0)  # at the last look: which thread was watched, and how long it had waited
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
        self._watched_thread, self._watched_native_id = threading.get_ident(), threading.get_native_id()
        self._task = _Task(name, self._clock(), limit_s, self._idle_s, involved)

    def end(self) -> None:
        self._task = None

    def check(self) -> bool:
        """Whether the present task has run over its limit; acts on that the first time."""
        task = self._task
        if task is None or self._has_fired:
            return self._has_fired
        busy_s = self._clock() - task.began_s - (self._idle_s - task.idle_s)
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
        late_s = self._clock() - self._looked_s - self._poll_interval_s
        self.note_idle(late_s=late_s, waited_s=self._waited_s())
        self._looked_s = self._clock()
        self.check()

    def note_idle(self, *, late_s: float, waited_s: float) -> None:
        """Since the last look. late_s: the watchdog itself got its turn so much later than it asked for; more
        than a little says that the process was stopped. waited_s: the watched thread, for a processor. What
        both tell of may be the same."""
        self._idle_s += max(late_s if late_s > self._poll_interval_s else 0.0, waited_s)

    def _waited_s(self) -> float:
        """The watched thread, since the last look; 0 for one that was not watched then."""
        thread, (known, known_s) = self._watched_native_id, self._waiting
        waited_s = waited_for_processor_s(thread)
        self._waiting = thread, waited_s
        return waited_s - known_s if thread == known else 0.0

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._watched_thread or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "(its stack is gone)"


def waited_for_processor_s(native_id: int) -> float:
    """For how long of its life this thread of ours could have run and had no processor, since others had them
    or its container's limit was used up; 0 where the kernel does not tell. Source: Linux,
    scheduler/sched-stats.rst."""
    try:
        stretch = Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()
    except OSError:  # another system, or the thread has ended
        return 0.0
    return int(stretch[1]) / 1e9


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
