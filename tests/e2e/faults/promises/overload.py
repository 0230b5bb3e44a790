"""Three times what it can serve: goodput holds, who is taken in is served in time, and it is over at once.

    probe at 60 %  ->  targets: twice the p99 of time to first token and of the gap between tokens
    85 %, 100 %    ->  peak: the most that met both targets, of any load
    300 %          ->  goodput, latency of whoever was taken in, refusals, memory
    60 % again     ->  how long it takes until everything is as before

As it comes: no bound is set. Prompts are all different, so capacity follows from the modelled step alone.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.e2e.faults import processes
from tests.e2e.faults.checks import Row, at_least, at_most, only_busy, percentile
from tests.e2e.faults.cluster import Cluster, Spec, cluster
from tests.e2e.faults.processes import resident_bytes
from tests.e2e.faults.traffic import OpenLoop, Outcome, Question

SHARE = 2.0

NUM_REPLICAS = 3
MAX_BATCHED_TOKENS = 256
STEP: dict[str, float] = {
    "base_s": 0.005,
    "per_token_s": 0.00025,  # 64 ms for a full step's tokens
    "per_attention_s": 0.0,
    "per_sequence_s": 0.0005,
}
PROMPT_TOKENS = (200, 1400)  # least and most, uniform
OUTPUT_TOKENS = (6, 18)
SPEC = Spec(
    replicas=NUM_REPLICAS,
    routers=1,
    # A small cache is full before anything is measured: what fills it is no growth.
    replica={"max_batched_tokens": MAX_BATCHED_TOKENS, "sim": {**STEP, "num_blocks": 1024}},
)

PROBE, OVERLOAD = 0.6, 3.0
BELOW_AND_AT = (0.85, 1.0)
GOODPUT_KEPT = 0.9
RECOVERY_LIMIT_S = 5.0
GROWTH_MIB = 10.0  # of all processes together, from the middle third of the overload to the last
_BAD_SHARE = 0.01  # of requests after which it counts as recovered: as many miss a p99
_SAMPLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds that a good answer takes at most."""

    ttft_s: float
    itl_s: float

    @classmethod
    def twice_p99(cls, outcomes: Sequence[Outcome]) -> Targets:
        return cls(2 * percentile(_ttfts(outcomes), 0.99), 2 * percentile(_gaps(outcomes), 0.99))

    def are_met(self, outcome: Outcome) -> bool:
        """By the whole answer: no gap in it is longer."""
        in_time = outcome.ttft_s is not None and outcome.ttft_s <= self.ttft_s
        return outcome.is_whole and in_time and max(_gaps([outcome]), default=0.0) <= self.itl_s

    def goodput(self, phase: Phase) -> float:
        """Per second."""
        return sum(map(self.are_met, phase.outcomes)) / phase.seconds


@dataclass(frozen=True, slots=True)
class Phase:
    """One load for some time; every answer heard out."""

    outcomes: Sequence[Outcome]
    began_s: float
    seconds: float
    memory: Sequence[tuple[float, int]] = ()

    @property
    def accepted(self) -> list[Outcome]:
        return [each for each in self.outcomes if each.status == 200]


async def run(duration_s: float) -> list[Row]:
    questions = different_questions(seed=4)
    async with cluster(SPEC) as running:
        await _load(running, questions, PROBE, 4.0)  # engines measure themselves
        before = await running.total("warmpath_rejections_total", reason="all_busy")
        probe = await _load(running, questions, PROBE, 0.3 * duration_s)
        others = [await _load(running, questions, load, 0.12 * duration_s) for load in BELOW_AND_AT]
        # One after the other, without a pause between.
        flood, after = await _flood(running, questions, 0.3 * duration_s, 0.16 * duration_s)
        refused = await running.total("warmpath_rejections_total", reason="all_busy") - before
    return _rows([probe, *others], flood, after, refused)


def _rows(calm: Sequence[Phase], flood: Phase, after: Phase, refused: float) -> list[Row]:
    targets = Targets.twice_p99(calm[0].outcomes)
    everything = [each for phase in (*calm, flood, after) for each in phase.outcomes]
    told = sum(each.status == 429 for each in everything)
    peak = max(map(targets.goodput, calm))
    return [
        only_busy("overload: whoever is refused is told 429", flood.outcomes),
        at_least(
            f"overload: goodput at 3x capacity, of the peak of {peak:.1f}/s",
            targets.goodput(flood) / peak,
            GOODPUT_KEPT,
        ),
        at_most(
            "overload: p99 time to first token of the accepted",
            percentile(_ttfts(flood.accepted), 0.99),
            targets.ttft_s,
        ),
        at_most(
            "overload: p99 gap between tokens of the accepted",
            percentile(_gaps(flood.accepted), 0.99),
            targets.itl_s,
        ),
        at_most("overload: Router and replicas grow by", growth_mib(flood.memory), GROWTH_MIB, "MiB"),
        at_most(
            "overload: as before after",
            recovery_s(after.outcomes, targets, after.began_s),
            RECOVERY_LIMIT_S,
        ),
        Row(
            "overload: every refusal is the Router's, none Serve's",
            f"{told} counted",
            f"{refused:.0f} counted",
            refused == told,
        ),
    ]


def recovery_s(outcomes: Sequence[Outcome], targets: Targets, began_s: float) -> float:
    """Seconds until, of the requests sent from then on, no more miss than may miss a p99."""
    later = sorted(outcomes, key=lambda each: each.sent_s)
    missed = list(itertools.accumulate(not targets.are_met(each) for each in reversed(later)))[::-1]
    for index, each in enumerate(later):
        if missed[index] <= _BAD_SHARE * (len(later) - index):
            return max(0.0, each.sent_s - began_s) if index else 0.0
    return later[-1].sent_s - began_s if later else float("nan")


def growth_mib(samples: Sequence[tuple[float, int]]) -> float:
    """From the mean of the middle third to that of the last; nan of fewer than three samples."""
    third = len(samples) // 3
    if not third:
        return float("nan")
    means = [
        sum(size for _, size in part) / len(part)
        for part in (samples[third : 2 * third], samples[2 * third :])
    ]
    return (means[1] - means[0]) / (1 << 20)


def capacity_per_s() -> float:
    """Requests per second of all replicas, every step full: prompts' tokens fill what decodes leave."""
    prompt, output = sum(PROMPT_TOKENS) / 2, sum(OUTPUT_TOKENS) / 2
    decoding = 0.0  # sequences, of one replica
    per_s = 0.0
    for _ in range(50):
        step_s = STEP["base_s"] + STEP["per_token_s"] * MAX_BATCHED_TOKENS
        step_s += STEP["per_sequence_s"] * (decoding + 1)
        per_s = (MAX_BATCHED_TOKENS - decoding) / step_s / prompt
        decoding = per_s * output * step_s
    return NUM_REPLICAS * per_s


def different_questions(seed: int) -> Iterator[Question]:
    """For ever: no two begin alike."""
    draw = random.Random(seed)
    while True:
        length = draw.randint(*PROMPT_TOKENS)
        yield Question(tuple(draw.choices(range(10, 1000), k=length)), draw.randint(*OUTPUT_TOKENS))


async def _load(
    running: Cluster, questions: Iterator[Question], load: float, seconds: float, **options: Any
) -> Phase:
    """load: of capacity."""
    rate_per_s = load * capacity_per_s()
    began_s = asyncio.get_running_loop().time()
    async with OpenLoop(running.url, questions, rate_per_s=rate_per_s, **options) as traffic:
        memory = await _watch_memory(running, seconds)
    return Phase(traffic.outcomes, began_s, seconds, memory)


async def _flood(
    running: Cluster, questions: Iterator[Question], flood_s: float, after_s: float
) -> tuple[Phase, Phase]:
    """Three times capacity, and then, with that still in the queues, what the probe was."""
    rates = OVERLOAD * capacity_per_s(), PROBE * capacity_per_s()
    clock = asyncio.get_running_loop().time
    flood_began_s = clock()
    async with OpenLoop(running.url, questions, rate_per_s=rates[0]) as flood:
        memory = await _watch_memory(running, flood_s)
        flood.stop()
        after_began_s = clock()
        async with OpenLoop(running.url, questions, rate_per_s=rates[1]) as after:
            await asyncio.sleep(after_s)
    return (
        Phase(flood.outcomes, flood_began_s, flood_s, memory),
        Phase(after.outcomes, after_began_s, after_s),
    )


async def _watch_memory(running: Cluster, seconds: float) -> list[tuple[float, int]]:
    """(seconds, bytes) of Routers and replicas together, while that long passes."""
    pids = [*running.routers(), *(each.pid for each in running.processes(processes.REPLICA))]
    clock = asyncio.get_running_loop().time
    end_s, samples = clock() + seconds, []
    while (now := clock()) < end_s:
        samples.append((now, sum(map(resident_bytes, pids))))
        await asyncio.sleep(min(_SAMPLE_S, end_s - now))
    return samples


def _ttfts(outcomes: Sequence[Outcome]) -> list[float]:
    return [each.ttft_s for each in outcomes if each.ttft_s is not None]


def _gaps(outcomes: Sequence[Outcome]) -> list[float]:
    """Seconds between two events with text: what is coalesced on the way comes at once."""
    return [later - earlier for each in outcomes for earlier, later in itertools.pairwise(each.token_times)]
