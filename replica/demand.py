"""What one replica tells whoever decides how many of them there are: what waits, and how busy it is.

It cannot see what Routers hold back until it is nearly free, and Routers have no way to that decision. So
each request brings along what its Router holds at that moment, as seconds of each replica's time, and the
latest of it counts down as a clock does: replicas work off no more than that, so what is told is never more
than what is there, but for clients who have gone; and it is over when its seconds are. What Routers refused
comes the same way, and is forgotten by and by.

Knows an engine's load and a clock; decides nothing. Owner: the replica's event loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from replica.scheduling.headroom import SPARE

if TYPE_CHECKING:  # Serve's controller reads the keys below, and needs no engine for that
    from cache.events import Load
    from cache.kv_cache_manager import CacheStats
    from replica.engine.engine_stats import EngineStats

QUEUED_KEY = "queued_s"  # seconds of prefill that wait in this engine
HELD_KEY = "held_s"  # seconds of this replica's time that wait at Routers: its share, the same for all
BUSY_KEY = "busy"  # 0 to 1: how much of what it can do it does
REFUSED_KEY = "refused"  # replicas more that its Routers' refused work would take, for each that there is

REFUSED_MEMORY_S = 20.0  # in which all but a third of what was told of refused work is forgotten


class Measured(Protocol):
    """What is asked of the engine. Any thread; never blocks."""

    def load(self) -> Load:
        """Its work as of the last step."""

    def stats(self) -> EngineStats:
        """Its counters as of the last step."""


class Demand:
    """Hears what Routers hold, and says what is wanted of this replica."""

    def __init__(
        self,
        engine: Measured,
        *,
        max_running: int,
        max_batched_tokens: int,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_running: sequences in one step. max_batched_tokens: of one step. block_size: tokens."""
        self._engine = engine
        self._max_running = max_running
        self._max_batched_tokens = max_batched_tokens
        self._block_size = block_size
        self._clock = clock
        self._held_until = clock()  # when what Routers were last heard to hold will have been worked off
        self._refused_ratio = 0.0  # as it was told
        self._told_at = clock()
        self._looked_at = clock()
        self._prompt_s = engine.stats().prompt_s  # told of so far
        self._prompt_share = 0.0  # of the time before it

    def told(self, held_s: float, refused_ratio: float) -> None:
        """A Router holds so many seconds of each replica's time, as of now, and has refused so much of what
        it placed. Replaces what was told before."""
        self._told_at = self._clock()
        self._held_until = self._told_at + held_s
        self._refused_ratio = refused_ratio

    def stats(self) -> dict[str, float]:
        """As Serve's `record_autoscaling_stats` wants it. Looks at the time since it was asked last."""
        now, load, stats = self._clock(), self._engine.load(), self._engine.stats()
        return {
            QUEUED_KEY: queued_s(load, self._max_batched_tokens, stats),
            HELD_KEY: max(0.0, self._held_until - now),
            BUSY_KEY: min(
                1.0, max(self._share(stats, now), self._places(load), self._blocks(load, stats.cache))
            ),
            REFUSED_KEY: self._refused_ratio * math.exp((self._told_at - now) / REFUSED_MEMORY_S),
        }

    def _places(self, load: Load) -> float:
        return load.num_running / self._max_running

    def _blocks(self, load: Load, cache: CacheStats) -> float:
        """All of them are taken while those that wait do not fit."""
        room = max(0, load.free_blocks - load.growth_blocks)
        if load.num_waiting and load.queued_uncached_tokens > room * self._block_size:
            return 1.0
        return _used(cache, load.num_running)

    def _share(self, stats: EngineStats, now: float) -> float:
        """Of the time since the last look, the part in which it computed prompts.

        A step counts when it is over: one that is longer than the time between two looks is told by several.
        """
        if now > self._looked_at:
            passed_s = now - self._looked_at
            counted_s = min(passed_s, stats.prompt_s - self._prompt_s)
            self._prompt_share = counted_s / passed_s
            self._looked_at, self._prompt_s = now, self._prompt_s + counted_s
        return self._prompt_share


def queued_s(load: Load, max_batched_tokens: int, stats: EngineStats) -> float:
    """Seconds until this engine has computed the prompts it has, by its own pace.

    Before that is fitted, by the mean of what it has computed so far; 0 before it has computed anything.
    """
    tokens, attention, prompts = load.queued_uncached_tokens, load.queued_attention, max(1, load.num_waiting)
    if load.step_time is None:
        return tokens * stats.prompt_s / max(1, stats.computed_tokens)
    if not tokens:
        return 0.0
    if attention is None:  # as prompts of equal length
        attention = tokens * tokens // (2 * prompts)
    num_steps = -(-tokens // max_batched_tokens)
    return load.step_time.step_s(tokens, attention, max(prompts, num_steps)) + load.step_time.base_s * (
        num_steps - 1
    )


def _used(cache: CacheStats, num_running: int) -> float:
    """Of the blocks that are not pinned, the part that running sequences have. A held prefix is no work.

    They are as good as used where one more like those that run does not fit: three quarters of them for one
    sequence, or a third for each of two, are all.
    """
    free_to_use, used = cache.total - cache.pinned, cache.used - cache.pinned
    if not used:
        return 0.0
    part = used / free_to_use
    fitting = math.floor((1.0 - SPARE) / part * num_running)
    return max(part, num_running / max(num_running, fitting, 1))
