"""Host memory behind an engine's pool: that its bytes stay under their cap, and what it gains.

The engine's own scheduler, cache and copies over the simulated runner, by a virtual clock: conversations that
do not fit into the pool together, and answers that outgrow it. Knows neither routers nor models.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from benchmarks.schedule.rows import Advance, Line, Section
from cache.block_hash import BlockHasher
from cache.fingerprint import Fingerprint, HashAlgorithm
from cache.messages import GenerateRequest, SamplingParams
from cache.types import RequestId
from loadtest.simulation.machine import H100_8B
from replica.config import ReplicaConfig, SimConfig
from replica.engine.engine_core import EngineCore
from replica.runners.sim_runner import SimRunner

NUM_BLOCKS = 1024  # of 16 tokens: an eighth of the conversations' prompts, or of what the answers grow to
# 2 MiB, 16 tokens of an 8-billion-parameter model, at 20 GB/s.
COPY_BLOCK_S = 0.0001
CONVERSATIONS, PROMPT_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 64, 2048, 64, 16
NUM_REQUESTS, RATE = 600, 6.0  # a second: what the engine can compute if it finds nothing is about eight
LONG_ANSWERS, LONG_ANSWER_TOKENS = 32, 1500
HOST_BLOCKS = (0, 2048, 8192)
VOCABULARY = 30_000


@dataclass(frozen=True, slots=True)
class Outcome:
    first_token_s: tuple[float, ...]
    seconds: float
    hit_tokens: int
    host_hit_tokens: int
    preemptions: int
    computed_tokens: int
    most_bytes: int  # that host memory held after any step
    cap_bytes: int


@dataclass(slots=True)
class _Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def measure(advance: Advance, seeds: int) -> list[Section]:
    """Means over seeds; the most bytes of any."""
    return [_conversations(advance, seeds), _long_answers(advance, seeds)]


def _conversations(advance: Advance, seeds: int) -> Section:
    section = Section(
        f"{CONVERSATIONS} conversations of {PROMPT_TOKENS:,} tokens by turns, {NUM_BLOCKS:,} blocks",
        ("cached", "from host", "mean TTFT, ms", "p99, ms", "most, MiB of cap"),
    )
    for num_slots in HOST_BLOCKS:
        advance(f"conversations, {num_slots} blocks of host memory")
        found = [_run(_turns(seed), num_slots) for seed in range(seeds)]
        prompts = NUM_REQUESTS * (PROMPT_TOKENS + TURN_TOKENS)
        cells = (
            f"{fmean(each.hit_tokens for each in found) / prompts:.0%}",
            f"{fmean(each.host_hit_tokens for each in found) / prompts:.0%}",
            f"{1000 * fmean(fmean(each.first_token_s) for each in found):.0f}",
            f"{1000 * fmean(np.quantile(each.first_token_s, 0.99) for each in found):.0f}",
        )
        section.lines.append(
            _line(f"host memory of {num_slots:,} blocks" if num_slots else "without", cells, found)
        )
    return section


def _long_answers(advance: Advance, seeds: int) -> Section:
    section = Section(
        f"{LONG_ANSWERS} answers of {LONG_ANSWER_TOKENS:,} tokens at once, {NUM_BLOCKS:,} blocks",
        ("put back", "computed tokens", "seconds", "", "most, MiB of cap"),
    )
    for name, num_slots, preemption in (
        ("recompute", 0, "recompute"),
        ("recompute, host memory", HOST_BLOCKS[1], "recompute"),
        ("swap", HOST_BLOCKS[1], "swap"),
    ):
        advance(f"long answers, {name}")
        found = [_run(_answers(seed), num_slots, preemption) for seed in range(seeds)]
        cells = (
            f"{fmean(each.preemptions for each in found):.0f}",
            f"{fmean(each.computed_tokens for each in found):,.0f}",
            f"{fmean(each.seconds for each in found):.1f}",
            "",
        )
        section.lines.append(_line(name, cells, found))
    return section


def _line(case: str, cells: tuple[str, ...], found: Sequence[Outcome]) -> Line:
    most, cap = max(each.most_bytes for each in found), found[0].cap_bytes
    if not cap:
        return Line(case, (*cells, "none"))
    # As if blocks were those of the model that the clock stands for: 2 MiB each.
    return Line(case, (*cells, f"{most >> 20:,} of {cap >> 20:,}"), "under its cap", most <= cap)


def _turns(seed: int) -> list[tuple[float, GenerateRequest]]:
    """(arrival, request), each of a conversation drawn at random."""
    rng = random.Random(seed)
    beginnings = [_tokens(rng, PROMPT_TOKENS) for _ in range(CONVERSATIONS)]
    now_s, found = 0.0, []
    for number in range(NUM_REQUESTS):
        now_s += rng.expovariate(RATE)
        prompt = beginnings[rng.randrange(CONVERSATIONS)] + _tokens(rng, TURN_TOKENS)
        found.append((now_s, _request(number, prompt, ANSWER_TOKENS)))
    return found


def _answers(seed: int) -> list[tuple[float, GenerateRequest]]:
    """All at once, after short ones: nobody expects how long they become."""
    rng = random.Random(seed)
    short = [(0.0, _request(number, _tokens(rng, 16), 4)) for number in range(4)]
    return short + [
        (1.0, _request(4 + number, _tokens(rng, TURN_TOKENS), LONG_ANSWER_TOKENS))
        for number in range(LONG_ANSWERS)
    ]


def _tokens(rng: random.Random, count: int) -> array[int]:
    return array("i", [rng.randrange(VOCABULARY) for _ in range(count)])


def _request(number: int, prompt: array[int], num_output: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    return GenerateRequest(RequestId(str(number)), prompt, len(prompt), sampling, seed=0)


def _run(
    work: Sequence[tuple[float, GenerateRequest]], num_slots: int, preemption: str = "recompute"
) -> Outcome:
    clock, config = _Clock(), ReplicaConfig()
    block_bytes = 8 * config.block_size  # of the simulated runner's pages
    config = ReplicaConfig(
        runner="simulated",
        sim=SimConfig(
            base_s=H100_8B.base_s,
            per_token_s=H100_8B.per_token_s,
            per_attention_s=H100_8B.per_attention_s,
            per_sequence_s=H100_8B.per_sequence_s,
            copy_block_s=COPY_BLOCK_S,
            num_blocks=NUM_BLOCKS,
            vocab_size=VOCABULARY,
        ),
        host_cache_gib=num_slots * block_bytes / (1 << 30),
        preemption=preemption,
        max_wait_s=None,
        max_waiting=len(work),
    )
    runner = SimRunner(
        config.sim, block_size=config.block_size, sleep=clock.sleep, host_cache_gib=config.host_cache_gib
    )
    mark = Fingerprint("virtual", "", "virtual", "", config.block_size, HashAlgorithm.XXH3_128)
    core = EngineCore(runner, config, BlockHasher(mark), clock=clock)
    first_token_s: dict[RequestId, float] = {}
    hit_tokens = most_slots = index = 0
    while index < len(work) or core.has_work:
        if not core.has_work:
            clock.now_s = max(clock.now_s, work[index][0])
        while index < len(work) and work[index][0] <= clock.now_s:
            core.submit(work[index][1], arrival_s=work[index][0])
            index += 1
        for progress in core.step():
            request = progress.request
            if request.request_id not in first_token_s:
                first_token_s[request.request_id] = clock.now_s - request.arrival_s
                hit_tokens += request.cached_tokens or 0
        most_slots = max(most_slots, core.stats().cache.host_used)
    report, stats = core.report(epoch=1, number=1), core.stats()
    return Outcome(
        first_token_s=tuple(first_token_s.values()),
        seconds=clock.now_s,
        hit_tokens=hit_tokens,
        host_hit_tokens=report.host_hits * config.block_size,
        preemptions=report.preemptions,
        computed_tokens=stats.computed_tokens,
        most_bytes=most_slots << 21,
        cap_bytes=num_slots << 21,
    )
