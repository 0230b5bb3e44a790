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
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from cache.deep_threads import DeepThreads
from cache.engine_report import COMPILE_BOUNDS_S, Distribution, Tally
from cache.errors import QueueFull, StructureRefused
from cache.fair_threads import FairThreads
from cache.structure import GrammarLimits, Structure
from replica.structures.matcher import StructureMatcher
from replica.structures.vocabulary import StructureVocabulary

MAX_KEPT = 64  # compiled structures, of 0.1 MB and up to 150 bytes for each character of their sources
MAX_KEPT_CHARS = 1 << 20  # of all sources: so 160 MB
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


@dataclass(eq=False, slots=True)
class _Asked:
    """One tenant's structure."""

    compiled: Future[StructureMatcher] = field(init=False)
    began_s: float | None = None  # when a thread took it, by the compiler's clock; None: it waits in line


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
        max_kept_chars: int = MAX_KEPT_CHARS,
        limit_s: float = COMPILE_LIMIT_S,
        build: Callable[[StructureVocabulary, Structure], StructureMatcher] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """limit_s: for each, and for its wait until then.
        build: instead of the real compilation, for tests. It raises StructureRefused.
        """
        self._vocabulary = vocabulary
        self._max_kept = max_kept
        self._max_kept_chars = max_kept_chars
        self._limit_s = limit_s
        self._build = build or compile_structure
        self._threads = FairThreads(
            NUM_THREADS, "warmpath-structures", max_pending=MAX_PENDING, pool=DeepThreads
        )
        self._clock = clock
        self._lock = threading.Lock()  # guards all below
        self._asked: OrderedDict[tuple[str, Structure], _Asked] = OrderedDict()
        self._num_chars = 0  # of their sources
        self._num_compiled = self._num_refused = 0
        self._compile_s = Tally(COMPILE_BOUNDS_S)

    def begin(self, structure: Structure, *, min_tokens: int = 0, tenant: str = "") -> StructureMatcher:
        asked, came_s = self._ask(structure, tenant), self._clock()
        while not asked.compiled.done() and (left_s := self._left_s(asked, came_s)) > 0:
            wait([asked.compiled], left_s)
        return self._begun(asked, min_tokens)

    async def begin_soon(
        self, structure: Structure, *, min_tokens: int = 0, tenant: str = ""
    ) -> StructureMatcher:
        asked, came_s = self._ask(structure, tenant), self._clock()
        if not asked.compiled.done():
            # Not cancelled with its caller: others may be waiting for the same one.
            waited = asyncio.wrap_future(asked.compiled)
            waited.add_done_callback(_look_at)
            while not waited.done() and (left_s := self._left_s(asked, came_s)) > 0:
                await asyncio.wait([waited], timeout=left_s)
        return self._begun(asked, min_tokens)

    def _left_s(self, asked: _Asked, came_s: float) -> float:
        """Of its own time, once it has begun; before that of what it may wait in line."""
        since_s = came_s if asked.began_s is None else asked.began_s
        return since_s + self._limit_s - self._clock()

    def _begun(self, asked: _Asked, min_tokens: int) -> StructureMatcher:
        """Raises an error of the caller's own: a remembered one that is raised again and again would keep
        what every caller had in hand, requests and all."""
        compiled = asked.compiled
        if compiled.done() and not compiled.cancelled():
            if (error := compiled.exception()) is not None:
                raise copy.copy(error)
            return compiled.result().begun(min_tokens)
        if compiled.cancelled() or asked.began_s is None:  # it gave way to another's, or had no turn in time
            raise QueueFull(self._threads.num_pending, MAX_PENDING)
        raise self._took_too_long()

    def totals(self) -> CompileTotals:
        with self._lock:
            return CompileTotals(self._num_compiled, self._num_refused, self._compile_s.distribution())

    def close(self) -> None:
        self._threads.close()

    def _ask(self, structure: Structure, tenant: str) -> _Asked:
        """Compiled, being compiled or waiting for that; refusals are kept like results. Raises QueueFull."""
        key = tenant, structure
        with self._lock:
            known = self._asked.get(key)
            if known is None or known.compiled.cancelled():
                is_new, known = known is None, _Asked()
                known.compiled = self._threads.submit(tenant, partial(self._compile, structure, known))
                self._asked[key] = known
                self._num_chars += len(structure.source) if is_new else 0
            self._asked.move_to_end(key)
            while len(self._asked) > self._max_kept or self._num_chars > self._max_kept_chars:
                (_, oldest), _ = self._asked.popitem(last=False)
                self._num_chars -= len(oldest.source)
        return known

    def _compile(self, structure: Structure, asked: _Asked) -> StructureMatcher:
        """On a thread of its own: counted, whatever comes of it."""
        began_s = asked.began_s = self._clock()
        is_refused = True
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
