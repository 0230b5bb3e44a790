"""An engine's report in one line."""

from __future__ import annotations

from typing import Any

from cache.engine_report import BOUNDS, FORMAT_VERSION, Distribution, EngineReport, Tally


def an_engine_report(**changes: Any) -> EngineReport:
    """Nothing has happened on a cache of 100 blocks, but for `changes`."""
    counts = (
        *("num_running", "num_waiting", "used_blocks", "cached_blocks"),
        *("prompt_tokens", "cached_prompt_tokens", "queried_tokens", "generated_tokens"),
        *("stopped", "length_limited", "handed_over", "aborted", "failed", "left_unread"),
        *("pinned_blocks", "max_pinned_blocks"),
        *("preemptions", "steps", "failed_steps", "computed_tokens"),
        *("decode_tokens", "mixed_steps", "cut_steps", "early_steps", "out_of_memory_steps", "step_budget"),
        *("host_blocks", "max_host_blocks", "swapped_blocks", "swapped"),
        *("host_hits", "host_declined", "host_saves", "host_loads"),
        *("compiled_structures", "refused_structures"),
    )
    fields: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "epoch": 1,
        "number": 1,
        "total_blocks": 100,
        "pins": (),
        **dict.fromkeys(counts, 0),
        **{name: Tally(bounds).distribution() for name, bounds in BOUNDS.items()},
    }
    return EngineReport(**{**fields, **changes})


def a_distribution(name: str, *values: float) -> Distribution:
    """Of these values, on the bounds of the field `name`."""
    tally = Tally(BOUNDS[name])
    for value in values:
        tally.add(value)
    return tally.distribution()
