"""What an engine has done and has, at a moment. A value: counts nothing itself."""

from __future__ import annotations

from dataclasses import dataclass

from cache.kv_cache_manager import CacheStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and the cache as it is. For metrics, logs and tests."""

    cache: CacheStats
    num_steps: int
    num_failed_steps: int
    computed_tokens: int  # new tokens of all steps, recomputed ones included
    output_tokens: int
    preemptions: int
    prompt_s: float  # seconds of the steps that computed prompts
    steps_ahead: int = 0  # of all steps, begun while the one before was computed
    wasted_tokens: int = 0  # computed in those for answers that had ended by then
