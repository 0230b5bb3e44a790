"""A few threads that tenants take turns at: who sends much waits for itself, and others for one job of it.

    waiting     alice: a1 a2 a3     bob: b1     carol: c1 c2
    run         a1 b1 c1 a2 c2 a3

A tenant's own jobs run in the order they came; of a tenant alone nothing else changes. A thread cannot be
stopped: what runs when somebody comes is waited for, however long it takes.
Knows threads and tenants' names; knows no jobs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from cache.errors import QueueFull

T = TypeVar("T")

_Job = Callable[[], Any]
_Line = OrderedDict[Future[Any], _Job]  # of one tenant, first come first


class FairThreads:
    """Runs jobs on threads of its own. Safe from any thread; `close` when done.

    A job's future is its place: cancelled while it waits, it leaves and is never run. Once it runs, it has
    its thread until it ends, whoever has given it up.
    """

    def __init__(
        self,
        num_threads: int,
        name: str,
        *,
        max_pending: int | None = None,
        pool: type[ThreadPoolExecutor] = ThreadPoolExecutor,
    ) -> None:
        """name: what threads' names begin with. max_pending: jobs that wait or run; None: callers see to it.
        pool: the kind of threads.
        """
        self._num_threads = num_threads
        self._max_pending = max_pending
        self._pool = pool(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()  # guards all below; not held while a job or a future's callback runs
        self._lines: OrderedDict[str, _Line] = OrderedDict()  # whose turn is next first; none without a job
        self._num_pending = 0
        self._num_working = 0  # threads that take jobs, or are about to
        self._is_closed = False

    @property
    def num_pending(self) -> int:
        """Jobs that wait or run."""
        return self._num_pending

    def submit(self, tenant: str, job: Callable[[], T]) -> Future[T]:
        """What the job returns or raises, once it was its tenant's turn.

        Where all places are taken, the last job of the tenant with most of them waiting gives way to one of a
        tenant with fewer: its future is cancelled. So nobody is kept out by another tenant's line.
        Raises QueueFull if nobody has more waiting, RuntimeError after `close`.
        """
        future: Future[T] = Future()
        future.add_done_callback(partial(self._given_up, tenant))
        with self._lock:
            if self._is_closed:
                raise RuntimeError("its threads have ended")
            displaced = self._make_room(tenant)
            self._lines.setdefault(tenant, OrderedDict())[future] = job
            self._num_pending += 1
            is_thread_free = self._num_working < self._num_threads
            self._num_working += is_thread_free
        if displaced is not None:
            displaced.cancel()
        if is_thread_free:
            self._begin_working(future)
        return future

    def close(self) -> None:
        """Cancel what waits; what runs ends by itself, and its thread with it. Idempotent."""
        with self._lock:
            self._is_closed = True
            waiting = [future for line in self._lines.values() for future in line]
        for future in waiting:
            future.cancel()
        self._pool.shutdown(wait=False)

    # --- places -------------------------------------------------------------------------------

    def _make_room(self, tenant: str) -> Future[Any] | None:
        """Who gives way, out of line already; None: there is room. Raises QueueFull. Under the lock."""
        if self._max_pending is None or self._num_pending < self._max_pending:
            return None
        own = len(self._lines.get(tenant, ()))
        longest = max(self._lines.values(), key=len, default=_Line())
        if own + 1 >= len(longest):  # or two would push each other out by turns
            raise QueueFull(self._num_pending, self._max_pending)
        displaced, _ = longest.popitem()
        return displaced

    def _given_up(self, tenant: str, future: Future[Any]) -> None:
        """It is done: nothing if it was run, else it leaves its line."""
        if not future.cancelled():
            return
        with self._lock:
            self._num_pending -= 1
            line = self._lines.get(tenant)
            if line is not None and line.pop(future, None) is not None and not line:
                del self._lines[tenant]

    # --- threads ------------------------------------------------------------------------------

    def _begin_working(self, future: Future[Any]) -> None:
        try:
            self._pool.submit(self._work)
        except BaseException:  # no thread can be started, or `close` came between
            with self._lock:
                self._num_working -= 1
            future.cancel()
            raise

    def _work(self) -> None:
        """On a thread, until nobody waits."""
        while (taken := self._take()) is not None:
            self._run(*taken)

    def _take(self) -> tuple[Future[Any], _Job] | None:
        """The job whose turn it is, running from now on; None: nobody waits, and the thread works no more."""
        with self._lock:
            while self._lines:
                tenant, line = self._lines.popitem(last=False)
                future, job = line.popitem(last=False)
                is_wanted = future.set_running_or_notify_cancel()
                if line:
                    self._lines[tenant] = line
                    self._lines.move_to_end(tenant, last=is_wanted)  # who leaves has had no turn
                if is_wanted:
                    return future, job
            self._num_working -= 1
            return None

    def _run(self, future: Future[Any], job: _Job) -> None:
        try:
            result = job()
        except BaseException as error:
            self._leave()
            future.set_exception(error)
            del future  # the error's traceback has this frame, and would keep itself alive by it
        else:
            self._leave()
            future.set_result(result)

    def _leave(self) -> None:
        """One has been run. Said before its future says so: who sees that may ask for the place at once."""
        with self._lock:
            self._num_pending -= 1
