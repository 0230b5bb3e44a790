"""What a request would cost on each replica: pure functions of values, in seconds.

    cost_r = (backlog_r + prefill_r(uncached | cached)) * decode_slowdown_r
           + (w - 1) * prefill_r(uncached - hot)
           + memory_pressure_r

The first line is the time to the first token. The second charges for computing again what somebody
else holds: near saturation the greedy choice wastes the fleet's time, so `w` grows with the queues; what
is *hot* is not charged, because one more copy of it will be used. The third keeps sequences from
pushing each other out. While any replica's speed is unknown, seconds cannot be compared, and
`tuning_free` orders all of them by uncached tokens times requests instead.

Knows tokens and seconds; knows neither hashes nor how ties are broken (`policies/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cache.types import ReplicaId
from router.load import LoadView

MEMORY_PRESSURE_S = 0.15  # lambda: costs as much at half full as 0.15 s of waiting
MAX_USED_FRACTION = 0.99  # keeps k / (1 - k) finite
MAX_RECOMPUTE_WEIGHT = 8.0  # beyond it, holding on to a prefix starves idle replicas
MIN_CHUNK_FRACTION = 1 / 8  # of a step's tokens that prefill gets at least, however many sequences decode


class Candidate(NamedTuple):
    """One replica as a decision sees it."""

    replica_id: ReplicaId
    load: LoadView
    cached_tokens: int  # of this prompt, usable: at least one token is left to compute
    is_matched: bool  # False: its cache is unknown to this router, so `cached_tokens` is 0


class RequestShape(NamedTuple):
    """One request as a decision sees it."""

    num_prompt_tokens: int
    hot_tokens: int = 0  # leading tokens used so often that another copy is an investment
    recompute_weight: float = 2.0  # w


class CostTerms(NamedTuple):
    """The parts of one replica's cost, all in seconds but the slowdown."""

    backlog_s: float
    prefill_s: float
    decode_slowdown: float  # >= 1: how much longer a prefill takes beside the sequences that decode
    recompute_s: float
    memory_pressure_s: float

    @property
    def total_s(self) -> float:
        return (
            (self.backlog_s + self.prefill_s) * self.decode_slowdown
            + self.recompute_s
            + self.memory_pressure_s
        )


def expected_time(candidate: Candidate, shape: RequestShape) -> CostTerms:
    """The cost in seconds, term by term. The candidate's step time must be known."""
    load, cached = candidate.load, candidate.cached_tokens
    model = load.step_time
    assert model is not None, "priced a replica that has not measured itself"
    budget = load.max_batched_tokens
    uncached = shape.num_prompt_tokens - cached
    prefill_s = model.prefill_s(uncached, cached, budget)
    known = max(cached, shape.hot_tokens)
    wasted_s = (
        prefill_s if known == cached else model.prefill_s(shape.num_prompt_tokens - known, known, budget)
    )
    return CostTerms(
        backlog_s=load.backlog_s,
        prefill_s=prefill_s,
        decode_slowdown=decode_slowdown(load),
        recompute_s=(shape.recompute_weight - 1.0) * wasted_s,
        memory_pressure_s=memory_pressure_s(load.used_fraction),
    )


def tuning_free(candidate: Candidate, shape: RequestShape) -> float:
    """Uncached tokens times requests after this one: needs no calibration. Not seconds."""
    uncached = shape.num_prompt_tokens - candidate.cached_tokens
    return float(uncached * (candidate.load.num_requests + 1))


def costs(candidates: Sequence[Candidate], shape: RequestShape) -> list[float]:
    """One cost per candidate, all in one unit: seconds, or tokens times requests if one is uncalibrated."""
    if all(candidate.load.step_time is not None for candidate in candidates):
        return [expected_time(candidate, shape).total_s for candidate in candidates]
    return [tuning_free(candidate, shape) for candidate in candidates]


def decode_slowdown(load: LoadView) -> float:
    """Time per prefilled token beside the running sequences, over the same alone. At least 1.

    A full step of `budget` tokens gives each running sequence one and prefill the rest.
    """
    model, budget, running = load.step_time, load.max_batched_tokens, load.num_running
    if model is None or not running:
        return 1.0
    alone_s = model.step_s(budget, 0.0, 1)
    mixed_s = model.step_s(budget, float(load.context_tokens), running + 1)
    chunk = max(budget - running, budget * MIN_CHUNK_FRACTION)
    return mixed_s / alone_s * (budget / chunk)


def memory_pressure_s(used_fraction: float) -> float:
    """lambda * k / (1 - k), k = fraction of blocks that running sequences use."""
    used = min(used_fraction, MAX_USED_FRACTION)
    return MEMORY_PRESSURE_S * used / (1.0 - used)


def recompute_weight(mean_queued: float) -> float:
    """w of the cost: 2 on an idle fleet, 2 more per queued request and replica, capped."""
    return min(2.0 + 2.0 * mean_queued, MAX_RECOMPUTE_WEIGHT)
