"""From structures to matchers, off the engine's thread: compiled once, kept for the next request.

Knows grammars, limits and threads; knows neither requests nor steps.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np

from cache.deep_threads import DeepThreads
from cache.engine_report import COMPILE_BOUNDS_S, Distribution, Tally
from cache.errors import QueueFull, StructureRefused
from cache.fair_threads import FairThreads
from cache.structure import GrammarLimits, Structure
from replica.structures.matcher import StructureMatcher
from replica.structures.vocabulary import StructureVocabulary

MAX_KEPT = 64  # compiled structures; with the states its text has visited one may reach 30 MB
MAX_PENDING = 64  # structures to compile: more are refused as busy
COMPILE_LIMIT_S = 5.0
NUM_THREADS = 2  # so that one that takes long does not keep everybody's waiting; tenants take turns at them


@dataclass(frozen=True, slots=True)
class CompileTotals:
    """What was compiled since the start."""

    num_compiled: int
    num_refused: int  # of those
    compile_s: Distribution


NOTHING_COMPILED = CompileTotals(0, 0, Tally(COMPILE_BOUNDS_S).distribution())


class Structures(Protocol):
    """What an engine follows structures with."""

    def begin(self, structure: Structure, *, min_tokens: int = 0, tenant: str = "") -> StructureMatcher:
        """A matcher at its beginning. Any thread; blocks while it is compiled. tenant: who asks.

        Raises StructureRefused, or QueueFull where too many are being compiled.
        """

    async def begin_soon(
        self, structure: Structure, *, min_tokens: int = 0, tenant: str = ""
    ) -> StructureMatcher:
        """The same without blocking the event loop."""

    def totals(self) -> CompileTotals:
        """For metrics. Any thread."""

    def close(self) -> None:
        """Compile nothing any more. Idempotent."""


class NoStructures:
    """`Structures` of an engine that cannot tell what its tokens stand for."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def begin(self, structure: Structure, *, min_tokens: int = 0, tenant: str = "") -> StructureMatcher:
        raise StructureRefused(self._reason)

    async def begin_soon(
        self, structure: Structure, *, min_tokens: int = 0, tenant: str = ""
    ) -> StructureMatcher:
        raise StructureRefused(self._reason)

    def totals(self) -> CompileTotals:
        return NOTHING_COMPILED

    def close(self) -> None:
        """Nothing to end."""


class StructureCompiler:
    """`Structures` over a vocabulary. A tenant's requests share futures: one compilation, however many ask.

    Tenants share none: the time to a first token does not tell what others have asked for, and nobody waits
    in somebody else's line.
    """

    def __init__(
        self,
        vocabulary: StructureVocabulary,
        *,
        max_kept: int = MAX_KEPT,
        limit_s: float = COMPILE_LIMIT_S,
        build: Callable[[StructureVocabulary, Structure], StructureMatcher] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """build: instead of the real compilation, for tests. It raises StructureRefused."""
        self._vocabulary = vocabulary
        self._max_kept = max_kept
        self._limit_s = limit_s
        self._build = build or compile_structure
        self._threads = FairThreads(
            NUM_THREADS, "warmpath-structures", max_pending=MAX_PENDING, pool=DeepThreads
        )
        self._clock = clock
        self._lock = threading.Lock()  # guards all below
        self._compiled: OrderedDict[tuple[str, Structure], Future[StructureMatcher]] = OrderedDict()
        self._num_compiled = self._num_refused = 0
        self._compile_s = Tally(COMPILE_BOUNDS_S)

    def begin(self, structure: Structure, *, min_tokens: int = 0, tenant: str = "") -> StructureMatcher:
        compiled = self._compiled_soon(structure, tenant)
        wait([compiled], self._limit_s)
        return self._begun(compiled, min_tokens)

    async def begin_soon(
        self, structure: Structure, *, min_tokens: int = 0, tenant: str = ""
    ) -> StructureMatcher:
        compiled = self._compiled_soon(structure, tenant)
        if not compiled.done():
            # Not cancelled with its caller: others may be waiting for the same one.
            waited = asyncio.wrap_future(compiled)
            waited.add_done_callback(_look_at)
            await asyncio.wait([waited], timeout=self._limit_s)
        return self._begun(compiled, min_tokens)

    def _begun(self, compiled: Future[StructureMatcher], min_tokens: int) -> StructureMatcher:
        """Raises an error of the caller's own: a remembered one that is raised again and again would keep
        what every caller had in hand, requests and all."""
        if compiled.running():
            raise self._took_too_long()
        if not compiled.done() or compiled.cancelled():  # it had no turn in time, or gave way to another's
            raise QueueFull(MAX_PENDING, MAX_PENDING)
        if (error := compiled.exception()) is not None:
            raise copy.copy(error)
        return compiled.result().begun(min_tokens)

    def totals(self) -> CompileTotals:
        with self._lock:
            return CompileTotals(self._num_compiled, self._num_refused, self._compile_s.distribution())

    def close(self) -> None:
        self._threads.close()

    def _compiled_soon(self, structure: Structure, tenant: str) -> Future[StructureMatcher]:
        """The future of its compilation, refusals kept like results. Raises QueueFull."""
        key = tenant, structure
        with self._lock:
            known = self._compiled.get(key)
            if known is None or known.cancelled():
                known = self._compiled[key] = self._threads.submit(tenant, lambda: self._compile(structure))
            self._compiled.move_to_end(key)
            while len(self._compiled) > self._max_kept:
                self._compiled.popitem(last=False)
        return known

    def _compile(self, structure: Structure) -> StructureMatcher:
        """On a thread of its own: counted, whatever comes of it."""
        began_s, is_refused = self._clock(), True
        try:
            matcher = self._build(self._vocabulary, structure)
            is_refused = False
            return matcher
        finally:
            with self._lock:
                self._num_compiled += 1
                self._num_refused += is_refused
                self._compile_s.add(self._clock() - began_s)

    def _took_too_long(self) -> StructureRefused:
        return StructureRefused(f"it takes longer to compile than the limit of {self._limit_s:g} s")


def compile_structure(vocabulary: StructureVocabulary, structure: Structure) -> StructureMatcher:
    """Compile it and try its first mask: some limits show only there. Raises StructureRefused."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        grammar = structure.grammar()
    except ValueError as error:
        raise StructureRefused("it is not JSON") from error
    limits = LLParserLimits(verbose_errors=False, **asdict(GrammarLimits()))
    compiled = StructureMatcher(LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=limits), vocabulary)
    tried = compiled.begun(0)
    words = np.zeros(vocabulary.num_words, dtype=np.int32)
    tried.fill(words)
    if (failure := tried.failure) is not None:
        raise StructureRefused(failure)
    if not words.any():
        raise StructureRefused("no text has it")
    return compiled


def _look_at(waited: asyncio.Future[StructureMatcher]) -> None:
    """So that nobody complains that its error was never asked for."""
    if not waited.cancelled():
        waited.exception()
