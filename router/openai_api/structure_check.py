"""Structures that are tried before anything is queued for them: once each, in line, on threads, in time.

What is found is remembered, and `structure_verdict.py` finds it. Knows tenants, threads and clocks; knows
nothing of what a structure says. Owner: the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from cache.deep_threads import DeepThreads
from cache.engine_report import Distribution, Tally
from cache.errors import QueueFull
from cache.fair_threads import FairThreads
from cache.structure import Structure
from router.errors import InvalidField, StructuresBusy
from router.openai_api.structure_verdict import UNKNOWN_REASON, Refusal, judge

MAX_REMEMBERED = 1024  # verdicts: a digest and a sentence each, and the structure, 64 KiB at most
MAX_REMEMBERED_BYTES = 16 << 20  # of their structures
NUM_THREADS = 2  # one structure that takes long does not keep everybody's waiting; tenants take turns at them
TRIED_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckStatistics:
    """What was tried since the start; what was remembered was not tried again."""

    num_followed: int
    num_refused: int
    num_pending: int
    tried_s: Distribution  # seconds each took, by `TRIED_BOUNDS_S`


@dataclass(eq=False, slots=True)
class _Asked:
    """One tenant's structure."""

    verdict: Future[Refusal | None] = field(init=False)
    began_s: float | None = None  # when a thread took it, by the checker's clock; None: it waits in line
    num_awaiting: int = 0


class StructureChecker:
    """Asks once for each structure of a tenant's. Owner: the router's event loop.

    What another tenant has asked for is tried again: by the time it takes nobody finds out what that was, and
    nobody's structure stands in somebody else's line.
    """

    def __init__(
        self, limit_s: float, max_pending: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """limit_s: for each, and for its wait until then. max_pending: to be tried at once, beyond which
        others are told to come back."""
        self._limit_s = limit_s
        self._max_pending = max_pending
        self._clock = clock
        self._threads = FairThreads(
            NUM_THREADS, "warmpath-structures", max_pending=max_pending, pool=DeepThreads
        )
        self._asked: OrderedDict[tuple[str, Structure], _Asked] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()  # guards what its threads count
        self._num_followed = self._num_refused = 0
        self._tried_s = Tally(TRIED_BOUNDS_S)

    async def check(self, structure: Structure, param: str, tenant: str = "") -> None:
        """Raises InvalidField, naming `param`, the place and the reason; or the limit it goes beyond.

        Raises StructuresBusy where others' structures leave no time for this one.
        """
        asked = self._ask(structure, tenant)
        refusal = asked.verdict.result() if asked.verdict.done() else await self._awaited(asked, param)
        if refusal is not None:
            where = "" if refusal.pointer is None else f" at {refusal.pointer}"
            raise InvalidField(param, f"'{param}' cannot be followed{where}: {refusal.reason}.")

    def statistics(self) -> CheckStatistics:
        num_pending = self._threads.num_pending
        with self._lock:
            return CheckStatistics(
                self._num_followed, self._num_refused, num_pending, self._tried_s.distribution()
            )

    def close(self) -> None:
        """Idempotent."""
        self._threads.close()

    async def _awaited(self, asked: _Asked, param: str) -> Refusal | None:
        """Its client's leaving takes it out of line, unless others wait for the same."""
        verdict, answered = asked.verdict, asyncio.wrap_future(asked.verdict)
        answered.add_done_callback(_look_at)
        asked.num_awaiting += 1
        came_s = self._clock()
        try:
            while not answered.done() and (left_s := self._left_s(asked, came_s)) > 0:
                await asyncio.wait([answered], timeout=left_s)
        except asyncio.CancelledError:
            if asked.num_awaiting == 1:
                verdict.cancel()
            raise
        finally:
            asked.num_awaiting -= 1
        if verdict.done() and not verdict.cancelled():  # which the loop may not have been told yet
            return verdict.result()
        if verdict.cancelled() or asked.began_s is None:
            raise StructuresBusy(self._max_pending)
        raise InvalidField(
            param, f"'{param}' must compile within {self._limit_s:g} seconds: it is too complex."
        )

    def _left_s(self, asked: _Asked, came_s: float) -> float:
        """Of its own time, once it has begun; before that of what it may wait in line."""
        since_s = came_s if asked.began_s is None else asked.began_s
        return since_s + self._limit_s - self._clock()

    def _ask(self, structure: Structure, tenant: str) -> _Asked:
        key = tenant, structure
        known = self._asked.get(key)
        if known is not None and not known.verdict.cancelled():  # it had to leave, or was left
            self._asked.move_to_end(key)
            return known
        asked = _Asked()
        try:
            asked.verdict = self._threads.submit(tenant, lambda: self._try(structure, asked))
        except QueueFull:
            raise StructuresBusy(self._max_pending) from None
        if known is None:
            self._num_bytes += len(structure.source)
        self._asked[key] = asked
        self._asked.move_to_end(key)
        while len(self._asked) > MAX_REMEMBERED or self._num_bytes > MAX_REMEMBERED_BYTES:
            (_, forgotten), _ = self._asked.popitem(last=False)
            self._num_bytes -= len(forgotten.source)
        return asked

    def _try(self, structure: Structure, asked: _Asked) -> Refusal | None:
        """On a thread: the verdict, counted."""
        began_s = asked.began_s = self._clock()
        try:
            refusal = judge(structure)
        except BaseException as error:  # a Rust library's panic is no Exception
            _log_failure(error, structure)
            refusal = Refusal(UNKNOWN_REASON)
        with self._lock:
            self._num_followed += refusal is None
            self._num_refused += refusal is not None
            self._tried_s.add(self._clock() - began_s)
        return refusal


def _log_failure(error: BaseException, structure: Structure) -> None:
    """Its place in the code, without its text: that may quote the structure."""
    textless = RuntimeError(type(error).__name__)
    logger.error(
        "structure could not be tried",
        extra={"kind": structure.kind.value, "error_type": type(error).__name__},
        exc_info=(RuntimeError, textless, error.__traceback__),
    )


def _look_at(answered: asyncio.Future[Refusal | None]) -> None:
    """So that nobody complains that its error was never asked for."""
    if not answered.cancelled():
        answered.exception()
