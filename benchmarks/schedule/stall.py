"""A long prompt arrives at sequences that decode: what that makes of the time between their tokens.

On the real engine by CPU time, which other processes do not lengthen, and on a simulated one by the virtual
clock. Every sequence that decodes gets a token in every step, so a step's time is a gap between two tokens.
"""

from __future__ import annotations

import math
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks import cases, models
from benchmarks.schedule.rows import Advance, Line, Section
from cache.block_hash import BlockHasher
from cache.fingerprint import Fingerprint, HashAlgorithm
from cache.host_tier import BlockMoves
from cache.messages import GenerateRequest, SamplingParams
from cache.types import RequestId
from replica.assembly import assemble
from replica.config import ReplicaConfig, SimConfig
from replica.engine.engine_core import EngineCore
from replica.runners.sim_runner import SimRunner
from replica.runners.virtual_clock import VirtualClock
from replica.scheduling.request import RequestState
from replica.scheduling.runner import CopyTime, Runner, RunnerInfo, ScheduledSequence, StepResult

TARGET = 2.0  # times the p99 of the time between tokens without the prompt
DECODES, PROMPT_TOKENS = 8, 4096
QUESTION_TOKENS, STEADY_STEPS = 64, 200
ANSWER_TOKENS = 700  # more than there are steps until the prompt is computed, a block in each

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Stall:
    """Seconds, on the engine's clock."""

    steady_p99_s: float
    stalled_p99_s: float  # while the long prompt is computed
    first_token_s: float  # of the long prompt

    @property
    def ratio(self) -> float:
        return self.stalled_p99_s / self.steady_p99_s


def measure(advance: Advance, repeats: int) -> Section:
    """Each engine with the relative limit, and without any."""
    section = Section(
        f"A prompt of {PROMPT_TOKENS:,} tokens arrives at {DECODES} decodes",
        ("p99 gap before, ms", "meanwhile, ms", "ratio", "its first token, ms"),
    )
    limits = (("as much again (itl_target_s: null)", None), ("no limit, as shipped", math.inf))
    for name, itl_target_s in limits:
        advance(f"simulated engine, {name}")
        section.lines.append(_line(f"simulated, {name}", _simulated(itl_target_s), itl_target_s))
    with tempfile.TemporaryDirectory(prefix="warmpath-bench-") as folder:
        model = str(models.build(cases.SMALL, Path(folder)))
        config = ReplicaConfig(
            model=model, device="cpu", dtype="float32", torch_threads=1, num_blocks=1024, max_wait_s=None
        )
        assembly = assemble(config)
        runner = CpuTimed(assembly.runner)
        runner.warm_up()
        for name, itl_target_s in limits:
            found = []
            for number in range(repeats):
                advance(f"9M model, {name}, {number + 1} of {repeats}")
                core = EngineCore(
                    runner,
                    replace(config, itl_target_s=itl_target_s),
                    BlockHasher(assembly.fingerprint),
                    clock=time.process_time,
                )
                found.append(stall(core, time.process_time, cases.SMALL.vocabulary))
            middle = sorted(found, key=lambda each: each.ratio)[len(found) // 2]
            section.lines.append(_line(f"9M model, CPU time, {name}", middle, itl_target_s))
        runner.close()
    return section


def stall(core: EngineCore, clock: Clock, vocabulary: int) -> Stall:
    """Let the engine learn what steps cost, then decode, then decode beside the prompt."""
    _learn(core, vocabulary)
    for number in range(DECODES):
        core.submit(_request(f"answer {number}", QUESTION_TOKENS, ANSWER_TOKENS, 1000 + number, vocabulary))
    while core.load().num_waiting or core.load().queued_uncached_tokens:
        core.step()
    steady = [_step_s(core, clock) for _ in range(STEADY_STEPS)]
    long = core.submit(_request("long", PROMPT_TOKENS, 1, 5000, vocabulary))
    began_s, stalled = clock(), []
    while long.state is not RequestState.FINISHED:
        stalled.append(_step_s(core, clock))
    first_token_s = clock() - began_s
    for request in list(core.requests()):
        core.cancel(request.request_id)
    return Stall(float(np.quantile(steady, 0.99)), float(np.quantile(stalled, 0.99)), first_token_s)


def _step_s(core: EngineCore, clock: Clock) -> float:
    began_s = clock()
    core.step()
    return clock() - began_s


def _learn(core: EngineCore, vocabulary: int) -> None:
    """Steps of all kinds: chunks alone, chunks beside decodes, decodes of several batch sizes."""
    for number, length in enumerate((40, 700, 90, 1500, 300, 20, 2500, 160)):
        core.submit(_request(f"learn {number}", length, 40, number, vocabulary))
        for _ in range(12):
            core.step()
    while core.has_work:
        core.step()


def _request(
    name: str, num_prompt_tokens: int, max_tokens: int, seed: int, vocabulary: int
) -> GenerateRequest:
    tokens = array("i", np.random.default_rng(seed).integers(3, vocabulary, num_prompt_tokens).tolist())
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(RequestId(name), tokens, num_prompt_tokens, sampling, seed=0)


def _simulated(itl_target_s: float | None) -> Stall:
    clock = VirtualClock()
    config = ReplicaConfig(runner="simulated", sim=SimConfig(), itl_target_s=itl_target_s, max_wait_s=None)
    mark = Fingerprint("simulated", "", "simulated", "", config.block_size, HashAlgorithm.XXH3_128)
    runner = SimRunner(config.sim, block_size=config.block_size, sleep=clock.sleep)
    core = EngineCore(runner, config, BlockHasher(mark), clock=clock)
    return stall(core, clock, config.sim.vocab_size)


def _line(case: str, found: Stall, itl_target_s: float | None) -> Line:
    cells = (
        f"{1000 * found.steady_p99_s:.1f}",
        f"{1000 * found.stalled_p99_s:.1f}",
        f"{found.ratio:.2f}x",
        f"{1000 * found.first_token_s:.0f}",
    )
    if itl_target_s == math.inf:
        return Line(case, cells)
    return Line(case, cells, f"at most {TARGET:.1f}x", found.ratio <= TARGET)


class CpuTimed:
    """A `Runner` whose steps took the CPU time that they used: what the engine then learns of them."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def execute(self, sequences: list[ScheduledSequence]) -> StepResult:
        began_s = time.process_time()
        result = self._runner.execute(sequences)
        return replace(result, elapsed_s=time.process_time() - began_s)

    def copy_blocks(self, moves: BlockMoves) -> Sequence[CopyTime]:
        return self._runner.copy_blocks(moves)

    def warm_up(self) -> float:
        return self._runner.warm_up()

    def close(self) -> None:
        self._runner.close()
