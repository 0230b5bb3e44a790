"""A long prompt arrives at sequences that decode: what that makes of the time between their tokens.

    without   |<-- 200 steps -->|<-- as many steps as with it: the same tokens -->|
    with      |<--  before   -->|<-- until the prompt's first token            -->|

The target is of what it was before. The same answers are decoded without the prompt as well, since their
contexts grow by hundreds of tokens meanwhile, and what that costs is not the prompt's doing. On the real
engine by CPU time, which other processes do not lengthen, and on a simulated one by the virtual clock. Every
sequence that decodes gets a token in every step, so a step's time is a gap between two tokens.
"""

from __future__ import annotations

import math
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
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

TARGET = 2.0  # times the p99 of the time between tokens before the prompt
DECODES, PROMPT_TOKENS = 8, 4096
QUESTION_TOKENS, STEADY_STEPS = 64, 200
ANSWER_TOKENS = 1_500  # more than there are steps until the prompt is computed, a block in each

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Stall:
    """Seconds, on the engine's clock."""

    before_p99_s: float  # of the steps before the prompt
    without_p99_s: float  # of the steps in which it would have been computed, had it come
    with_p99_s: float
    first_token_s: float  # of the prompt

    @property
    def ratio(self) -> float:
        return self.with_p99_s / self.before_p99_s


def measure(advance: Advance, repeats: int) -> Section:
    """Each engine with the relative limit (`itl_target_s: null`), and without any, as shipped."""
    section = Section(
        f"A prompt of {PROMPT_TOKENS:,} tokens arrives at {DECODES} decodes: p99 between tokens, ms",
        ("before", "with it", "ratio", "the same without it", "ratio", "its first token, ms"),
    )
    limits = (("as much again", None), ("no limit", math.inf))
    for name, itl_target_s in limits:
        advance(f"simulated engine, {name}")
        section.lines.append(_line(f"simulated, {name}", _simulated(itl_target_s), itl_target_s))
    with tempfile.TemporaryDirectory(prefix="warmpath-bench-") as folder:
        model = str(models.build(cases.SMALL, Path(folder)))
        config = ReplicaConfig(
            model=model, device="cpu", dtype="float32", torch_threads=1, num_blocks=2048, max_wait_s=None
        )
        assembly = assemble(config)
        runner = CpuTimed(assembly.runner)
        runner.warm_up()
        for name, itl_target_s in limits:
            found = []
            for number in range(repeats):
                advance(f"9M model, {name}, {number + 1} of {repeats}")
                cores = (
                    EngineCore(
                        runner,
                        replace(config, itl_target_s=itl_target_s),
                        BlockHasher(assembly.fingerprint),
                        clock=time.process_time,
                    )
                    for _ in range(2)
                )
                found.append(stall(cores, time.process_time, cases.SMALL.vocabulary))
            middle = sorted(found, key=lambda each: each.ratio)[len(found) // 2]
            section.lines.append(_line(f"9M model, {name}", middle, itl_target_s))
        runner.close()
    return section


def stall(cores: Iterable[EngineCore], clock: Clock, vocabulary: int) -> Stall:
    """With the prompt on the first engine, then without it on the second."""
    first, second = cores
    before, stalled = _run(first, clock, vocabulary, steps=None)
    _, undisturbed = _run(second, clock, vocabulary, steps=len(stalled))
    return Stall(_p99(before), _p99(undisturbed), _p99(stalled), first_token_s=sum(stalled))


def _p99(gaps: list[float]) -> float:
    return float(np.quantile(gaps, 0.99))


def _run(
    core: EngineCore, clock: Clock, vocabulary: int, *, steps: int | None
) -> tuple[list[float], list[float]]:
    """Let the engine learn what steps cost, then decode, then decode on; each step's seconds of both.

    steps: so many in the end. None: as many as a prompt that arrives takes.
    """
    _learn(core, vocabulary)
    for number in range(DECODES):
        core.submit(_request(f"answer {number}", QUESTION_TOKENS, ANSWER_TOKENS, 1000 + number, vocabulary))
    while core.load().num_waiting or core.load().queued_uncached_tokens:
        core.step()
    before = [_step_s(core, clock) for _ in range(STEADY_STEPS)]
    if steps is None:
        prompt = core.submit(_request("long", PROMPT_TOKENS, 1, 5000, vocabulary))
        meanwhile = []
        while prompt.state is not RequestState.FINISHED:
            meanwhile.append(_step_s(core, clock))
    else:
        meanwhile = [_step_s(core, clock) for _ in range(steps)]
    answers = list(core.requests())
    assert len(answers) == DECODES, "an answer ended: what was measured were not its gaps"
    for request in answers:
        core.cancel(request.request_id)
    return before, meanwhile


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
    config = ReplicaConfig(runner="simulated", sim=SimConfig(), itl_target_s=itl_target_s, max_wait_s=None)
    mark = Fingerprint("simulated", "", "simulated", "", config.block_size, HashAlgorithm.XXH3_128)
    clock = VirtualClock()
    cores = (
        EngineCore(
            SimRunner(config.sim, block_size=config.block_size, sleep=clock.sleep),
            config,
            BlockHasher(mark),
            clock=clock,
        )
        for _ in range(2)
    )
    return stall(cores, clock, config.sim.vocab_size)


def _line(case: str, found: Stall, itl_target_s: float | None) -> Line:
    cells = (
        f"{1000 * found.before_p99_s:.1f}",
        f"{1000 * found.with_p99_s:.1f}",
        f"{found.ratio:.2f}x",
        f"{1000 * found.without_p99_s:.1f}",
        f"{found.with_p99_s / found.without_p99_s:.2f}x",
        f"{1000 * found.first_token_s:.0f}",
    )
    if itl_target_s == math.inf:
        return Line(case, cells)
    return Line(case, cells, f"at most {TARGET:.0f}x", found.ratio <= TARGET)


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
