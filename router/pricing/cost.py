"""What a request would cost on each replica: pure functions of values, in seconds.

    cost_r = backlog_r + prefill_r(uncached | cached)           until its first token
           + (w - 1) * prefill(uncached - hot)                  the fleet's time, spent again
           + regret_r * prefill_r(uncached - hot)               and what new blocks push out, computed again
           - (1 - 1 / uses) * prefill_r(hot, where not cached)  later requests' share of a copy
           + passed_r                                           what longer prompts there wait for it
           + alone_r                                            steps that its answer shares with nobody
           + memory_pressure_r

The first line is the time to the first token, beside the sequences that decode: each step also computes one
token for each of them, and a request that finds nobody queued still waits for the step in progress
(`step_clock.py`): half of one at least where others hold more of the prompt, for no copy is worth making
because a step happens to end. The second charges for computing again what somebody else holds: a second of
the fleet's time delays all who come until the queues are empty again, so `w` grows with the queues
(`RecomputeCharge`). Those are seconds of the fleet's typical replica, whoever computes: what a slow one
spends is worth less, and at its own price it would stand idle while others wait for a fast one. What is *hot*
is not charged: one more copy of it will be used by others, who bear its cost with the one that makes it. But
where the blocks that it pushes out are in use themselves there is nothing to gain: as far as those are used
as often as the copy would be, it is charged as if nothing were hot (`uses_lost`). The third line is rent: new
blocks take the room of old ones, which are missed the sooner the faster a cache turns over (`evictions.py`).
The fifth is for engines that let a shorter prompt by: what waits there is before it, and in its backlog, or
is passed by it (`placement/passing.py`). The sixth is for machines that several engines compute on: what one
of them takes the others wait for (`machines.py`). The last keeps sequences from pushing each other out.
While a replica's speed can neither be known nor be assumed (`replica_load.py`), seconds cannot be compared,
and `tuning_free` orders all of them by uncached tokens times requests instead.

Knows tokens and seconds; knows neither hashes nor how ties are broken (`policies/`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

try:
    import router.native.costs as compiled
except ModuleNotFoundError:  # no C compiler where this was installed: the same costs, by a loop in Python
    compiled = None  # type: ignore[assignment]

from cache.events import StepTimeModel
from cache.types import ReplicaId
from router.pricing.load_view import LoadView

# lambda: costs as much at half full as 0.15 s of waiting. Worth nothing on a fleet of equals whose caches are
# large, and something where they are small (docs/design/006-decision.md).
MEMORY_PRESSURE_S = 0.15
# Above it memory counts as full: a saturated replica's is always within hundredths of its end, and
# k / (1 - k) would make many seconds of each; and prefixes that running sequences share take half of a cache
# and more without being short of anything. Who waits for memory is in the queue, and so in the backlog.
MAX_USED_FRACTION = 0.5
# Of newcomers, who find no replica free, at the least. The twins of a burst come before any queue shows:
# while others are free it delays nobody to compute all of them at once, but it serves nobody either.
LEAST_TAKEN = 0.5
IS_COMPILED = compiled is not None  # whether costs are summed in C
MIN_CHUNK_FRACTION = 1 / 8  # of a step's tokens that prefill gets at least, however many sequences decode


class Price(NamedTuple):
    """What a replica's time costs at one moment: all that `expected_times` asks of it.

    Derived when the replica reports, so that a decision among many replicas is one short loop.
    """

    busy_until: float  # when the prefill ahead of a new request will be done, seconds of the clock
    step_time: StepTimeModel  # the same object for all that are of one speed: a decision asks each once
    decode_s: float  # of each step, for the tokens that its running sequences get in it
    room: int  # prompt tokens a step has room for beside the running sequences
    step_s: float  # of a step in which those that run decode, and nobody else; 0 while nobody runs
    boundary_at: float  # what is sent by then is in the step after the present one; -inf: nobody knows when
    memory_pressure: float  # k / (1 - k), k = fraction of blocks that running sequences use
    fleet_time: StepTimeModel  # of a typical replica; `step_time` itself for those that are one
    regret: float = 0.0  # of a block that it evicts: how often that is asked for again, and computed
    alone_s: float = 0.0  # of a machine that others compute on: for a newcomer's steps that nobody shares
    uses_lost: float = 0.0  # of a block that it evicts: how often that was asked for in a minute or two
    passed_s: float = 0.0  # what others in its queue would wait for this request, which goes before them


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
    hot_share: float = 1.0  # of computing the hot tokens, what this request bears: 1 / uses of a copy
    most_cached: int = 0  # usable tokens, where most of it is held


class CostTerms(NamedTuple):
    """The parts of one replica's cost, all in seconds but the slowdown."""

    backlog_s: float  # until it starts: behind other prefills, or the step in progress
    prefill_s: float  # alone
    decode_slowdown: float  # >= 1: how much longer both take beside the sequences that decode
    recompute_s: float  # for computing again what others hold; negative for a copy that others will use
    passed_s: float  # that longer prompts in its queue wait for it
    alone_s: float  # for steps that its answer shares with nobody, where others compute on the machine
    memory_pressure_s: float

    @property
    def total_s(self) -> float:
        return (
            (self.backlog_s + self.prefill_s) * self.decode_slowdown
            + self.recompute_s
            + self.passed_s
            + self.alone_s
            + self.memory_pressure_s
        )


def expected_times(
    prices: Sequence[Price],
    cached: Sequence[int],
    shape: RequestShape,
    now: float,
    memory_pressure_s: float = MEMORY_PRESSURE_S,
) -> list[float]:
    """The cost on each replica, seconds: the sum of `cost_terms`, in C where that is compiled.

    cached: usable tokens of the prompt that each holds.
    """
    sum_up = compiled.expected_times if IS_COMPILED else interpreted_times
    return sum_up(prices, cached, shape, now, memory_pressure_s)


def interpreted_times(
    prices: Sequence[Price], cached: Sequence[int], shape: RequestShape, now: float, memory_pressure_s: float
) -> list[float]:
    """`expected_times` without what is compiled, written for speed. `native/costs.c` does as this does."""
    total, hot, weight, hot_share, most = shape
    surcharge, invested = weight - 1.0, 1.0 - hot_share
    square, before = total * total, -1
    uncached = num_chunks = 0
    pairs = prefill_s = charged_s = 0.0
    cold, cold_pairs = total - hot, (square - hot * hot) / 2.0
    cold_s = again_s = 0.0
    model: StepTimeModel | None = None
    cold_model: StepTimeModel | None = None
    cold_room = 0
    found = []
    for price, held in zip(prices, cached, strict=True):
        (
            busy_until,
            step_time,
            decode_s,
            room,
            step_s,
            boundary_at,
            pressure,
            fleet_time,
            regret,
            alone_s,
            uses,
            passed_s,
        ) = price
        # Mostly all hold the same system prompt, or nothing, and are machines of one kind.
        if held != before:
            # u uncached tokens after c cached ones attend u * (c + u / 2) = (n * n - c * c) / 2 pairs.
            uncached, pairs, before, model = total - held, (square - held * held) / 2.0, held, None
        chunks = 1 if uncached <= room else -(-uncached // room)
        if step_time is not model or chunks != num_chunks:
            model, num_chunks = step_time, chunks
            prefill_s = (
                chunks * (step_time.base_s + step_time.per_sequence_s)
                + uncached * step_time.per_token_s
                + pairs * step_time.per_attention_s
            )
            charged_s = weight * prefill_s
            if fleet_time is not step_time:
                charged_s = prefill_s + surcharge * _alone_s(fleet_time, room, uncached, pairs)
        wait_s, left_s = busy_until - now, boundary_at - now
        if left_s < 0.0:  # as `step_left_s` has it
            left_s = (left_s % step_s if boundary_at != -math.inf else step_s / 2.0) if step_s else 0.0
        if held < most and left_s < step_s / 2.0:
            left_s = step_s / 2.0
        if wait_s < left_s:
            wait_s = left_s
        other_s = wait_s + passed_s + chunks * decode_s + alone_s + memory_pressure_s * pressure
        if hot > held:
            if step_time is not cold_model or (room != cold_room and cold > min(room, cold_room)):
                cold_model, cold_room = step_time, room
                cold_s = again_s = _alone_s(step_time, room, cold, cold_pairs)
                if fleet_time is not step_time:
                    again_s = _alone_s(fleet_time, room, cold, cold_pairs)
            charge_s = surcharge * again_s + regret * cold_s
            invested_s = prefill_s + charge_s - invested * (prefill_s - cold_s)
            if uses:
                swapped = min(1.0, uses * hot_share)
                invested_s += swapped * (charged_s + regret * prefill_s - invested_s)
            found.append(other_s + invested_s)
        else:
            found.append(other_s + charged_s + regret * prefill_s)
    return found


def _alone_s(model: StepTimeModel, room: int, uncached: int, pairs: float) -> float:
    """Seconds of so much prefill in steps of its own. pairs: (query, key)."""
    chunks = -(-uncached // room)
    fixed_s = chunks * (model.base_s + model.per_sequence_s)
    return fixed_s + uncached * model.per_token_s + pairs * model.per_attention_s


def prefill_s(price: Price, num_prompt_tokens: int, cached: int) -> float:
    """Seconds to prefill what is left of a prompt in chunks, without what decodes add to them."""
    return _prefill_s(price.step_time, price.room, num_prompt_tokens, cached)


def fleet_prefill_s(price: Price, num_prompt_tokens: int, cached: int) -> float:
    """`prefill_s` on a typical replica of the fleet."""
    return _prefill_s(price.fleet_time, price.room, num_prompt_tokens, cached)


def _prefill_s(model: StepTimeModel, room: int, num_prompt_tokens: int, cached: int) -> float:
    uncached = num_prompt_tokens - cached
    if uncached <= 0:
        return 0.0
    return _alone_s(model, room, uncached, uncached * (cached + uncached / 2.0))


def engine_s(price: Price, num_prompt_tokens: int, cached: int) -> float:
    """Seconds of the engine's time that prefilling the rest of a prompt takes, in steps shared with others.

    Unlike `prefill_s` it counts what the sequences that decode get in the meantime, and only the part of a
    step that the prompt fills.
    """
    uncached = num_prompt_tokens - cached
    if uncached <= 0:
        return 0.0
    pairs = uncached * (cached + uncached / 2.0)
    steps, model = uncached / price.room, price.step_time
    fixed_s = steps * (model.base_s + model.per_sequence_s + price.decode_s)
    return fixed_s + uncached * model.per_token_s + pairs * model.per_attention_s


def cost_terms(
    price: Price,
    cached: int,
    shape: RequestShape,
    now: float,
    memory_pressure_s: float = MEMORY_PRESSURE_S,
) -> CostTerms:
    """The cost in seconds, term by term, for whoever wants to explain it."""
    total = shape.num_prompt_tokens
    backlog_s = max(price.busy_until - now, step_left_s(price, now))
    if cached < shape.most_cached:
        backlog_s = max(backlog_s, price.step_s / 2.0)
    own_s = prefill_s(price, total, cached)
    decode_s = -(-(total - cached) // price.room) * price.decode_s
    return CostTerms(
        backlog_s=backlog_s,
        prefill_s=own_s,
        decode_slowdown=(backlog_s + own_s + decode_s) / (backlog_s + own_s) if own_s else 1.0,
        recompute_s=_recompute_s(price, cached, own_s, shape),
        passed_s=price.passed_s,
        alone_s=price.alone_s,
        memory_pressure_s=memory_pressure_s * price.memory_pressure,
    )


def _recompute_s(price: Price, cached: int, own_s: float, shape: RequestShape) -> float:
    """Of `CostTerms`. own_s: of its prefill, alone."""
    total, surcharge = shape.num_prompt_tokens, shape.recompute_weight - 1.0
    as_cold_s = surcharge * fleet_prefill_s(price, total, cached) + price.regret * own_s
    if shape.hot_tokens <= cached:
        return as_cold_s
    cold_s = prefill_s(price, total, shape.hot_tokens)
    charged_s = surcharge * fleet_prefill_s(price, total, shape.hot_tokens) + price.regret * cold_s
    invested_s = charged_s - (1.0 - shape.hot_share) * (own_s - cold_s)
    swapped = min(1.0, price.uses_lost * shape.hot_share)
    return invested_s + swapped * (as_cold_s - invested_s)


def expected_time(candidate: Candidate, shape: RequestShape) -> CostTerms:
    """`cost_terms` of a candidate. Its step time must be known."""
    price = price_of(candidate.load)
    assert price is not None, "priced a replica that has not measured itself"
    return cost_terms(price, candidate.cached_tokens, shape, now=0.0)


def tuning_free(uncached_tokens: int, num_requests: int) -> float:
    """Uncached tokens times requests after this one: needs no calibration. Not seconds."""
    return float(uncached_tokens * (num_requests + 1))


def costs(
    candidates: Sequence[Candidate], shape: RequestShape, *, memory_pressure_s: float = MEMORY_PRESSURE_S
) -> list[float]:
    """One cost per candidate, all in one unit: seconds, or tokens times requests if one is uncalibrated."""
    prices = [price_of(candidate.load) for candidate in candidates]
    cached = [candidate.cached_tokens for candidate in candidates]
    known = [price for price in prices if price is not None]
    if len(known) == len(candidates):
        return expected_times(known, cached, shape, 0.0, memory_pressure_s)
    return [
        tuning_free(shape.num_prompt_tokens - candidate.cached_tokens, candidate.load.num_requests)
        for candidate in candidates
    ]


def price_of(load: LoadView) -> Price | None:
    """The price of a replica under that load, at time 0; None while its speed is unknown."""
    if load.step_time is None:
        return None
    return price(
        load.backlog_s,
        load.step_time,
        load.max_batched_tokens,
        load.num_running,
        load.context_tokens,
        load.used_fraction,
        load.fleet_time,
        load.regret,
        load.alone_s,
        load.uses_lost,
        step_left_s=load.step_left_s,
    )


def price(
    busy_until: float,
    model: StepTimeModel,
    max_batched_tokens: int,
    num_running: int,
    context_tokens: int,
    used_fraction: float,
    fleet_time: StepTimeModel | None = None,
    regret: float = 0.0,
    alone_s: float = 0.0,
    uses_lost: float = 0.0,
    step_left_s: float | None = None,
) -> Price:
    """At time 0. fleet_time: None where nobody knows another than this one's own; step_left_s likewise."""
    decode_s = decode_step_s(model, num_running, context_tokens)
    return Price(
        busy_until,
        model,
        decode_s,
        prefill_room(max_batched_tokens, num_running),
        decoding_step_s(model, num_running, decode_s),
        -math.inf if step_left_s is None else step_left_s,
        memory_pressure(used_fraction),
        fleet_time or model,
        regret,
        alone_s,
        uses_lost,
    )


def step_left_s(price: Price, now: float) -> float:
    """Until the step is over that whoever is sent now finds in progress: half of one, where nobody knows when
    it began."""
    left_s = price.boundary_at - now
    if left_s >= 0.0 or not price.step_s:
        return max(0.0, left_s)
    return left_s % price.step_s if price.boundary_at != -math.inf else price.step_s / 2.0


def decoding_step_s(model: StepTimeModel, num_running: int, decode_s: float) -> float:
    """Of a step in which only those decode who run; 0 while nobody does. decode_s: what they take of it."""
    return model.base_s + decode_s if num_running else 0.0


def decode_step_s(model: StepTimeModel, num_running: int, context_tokens: int) -> float:
    """What so many sequences add to a step in which each gets a token, seconds."""
    if not num_running:
        return 0.0
    return model.step_s(num_running, float(context_tokens), num_running) - model.base_s


def prefill_room(max_batched_tokens: int, num_running: int) -> int:
    """Prompt tokens in a full step: each running sequence takes one token of it."""
    return max(1, max_batched_tokens - num_running, int(max_batched_tokens * MIN_CHUNK_FRACTION))


def memory_pressure(used_fraction: float) -> float:
    """k / (1 - k), k = fraction of blocks that running sequences use: the seconds are the policy's."""
    used = min(used_fraction, MAX_USED_FRACTION)
    return used / (1.0 - used)


@dataclass(frozen=True, slots=True)
class RecomputeCharge:
    """w of the cost: how much dearer than waiting it is to compute again what somebody else holds.

    A second of work delays, beside its own request, whoever comes until the queue is empty. In an M/G/1 queue
    with backlog B, arrivals at rate a and utilization u those are a * B / (1 - u): the slope of its relative
    value. By Little's law a * B is about the number there: q that wait, and one more where no replica is
    free, which the part `taken` of newcomers finds; while one is, whoever comes goes there. 1 / (1 - u) is
    about 1 + q (M/M/1). Hence w = 1 + (taken + q) * (1 + q): a long queue will not be empty soon. `taken`
    counts as `LEAST_TAKEN` at least.
    """

    idle: float = 2.0  # with nobody queued, where no replica is free; where one always is, halfway to 1
    per_queued: float = 1.0  # more of it per q * (1 + taken + q), q queued requests per replica
    most: float = 100.0  # reached with nine queued: overload lasts, but not for ever

    def weight(self, mean_queued: float, taken: float) -> float:
        """mean_queued: requests per replica, from 0. taken: of newcomers, who find none free, 0 to 1."""
        present = max(taken, LEAST_TAKEN)
        queued = self.per_queued * mean_queued * (1.0 + present + mean_queued)
        return min(1.0 + (self.idle - 1.0) * present + queued, self.most)
