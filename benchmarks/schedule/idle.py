"""How long a device waits for the program between two steps: one by one, and begun ahead.

The device is simulated and its steps last by the real clock; schedule and cache are the engine's own, and
take the time they take. Knows no model.
"""

from __future__ import annotations

import statistics
import time
from array import array

from benchmarks.schedule.rows import Advance, Line, Section
from cache.block_hash import BlockHasher
from cache.fingerprint import Fingerprint, HashAlgorithm
from cache.messages import GenerateRequest, SamplingParams
from cache.types import RequestId
from replica.config import ReplicaConfig, SimConfig
from replica.engine.engine_core import EngineCore
from replica.runners.sim_runner import SimRunner

BATCHES = (8, 64)
STEP_S = 0.010  # an 8-billion-parameter model's decode at batch 64, about
OUTPUT_TOKENS = 64


def measure(advance: Advance, repeats: int) -> Section:
    """Median of so many runs of each, in turns."""
    columns = ("steps begun ahead", "waits a step, ms", "program's CPU a step, ms")
    section = Section(f"A device with decode steps of {STEP_S * 1000:g} ms: how long it waits", columns)
    for batch in BATCHES:
        advance(f"{batch} sequences")
        runs: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
        for _ in range(repeats):
            for ahead in runs:
                runs[ahead].append(_waits(batch, ahead=ahead))
        found = {
            ahead: [statistics.median(column) for column in zip(*runs[ahead], strict=True)] for ahead in runs
        }
        for ahead, (share, idle_s, cpu_s) in found.items():
            name = "begun ahead" if ahead else "one by one"
            cells = (f"{share:.0%}", f"{idle_s * 1000:.2f}", f"{cpu_s * 1000:.2f}")
            is_half = idle_s <= found[False][1] / 2
            section.lines.append(
                Line(f"{batch} sequences, {name}", cells, "at most half" if ahead else "", is_half)
            )
    return section


def _waits(batch: int, *, ahead: bool) -> tuple[float, float, float]:
    """Share of steps begun ahead; seconds a step that the device had nothing to do; CPU seconds of a step."""
    sim = SimConfig(base_s=STEP_S, per_token_s=0.0, per_attention_s=0.0, per_sequence_s=0.0)
    config = ReplicaConfig(runner="simulated", sim=sim, async_scheduling=ahead, max_wait_s=None)
    runner = SimRunner(sim, block_size=config.block_size, clock=time.perf_counter)
    mark = Fingerprint("idle", "", "simulated", "", config.block_size, HashAlgorithm.XXH3_128)
    core = EngineCore(runner, config, BlockHasher(mark), clock=time.perf_counter)
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=1.0, ignore_eos=True)
    for index in range(batch):
        # Of lengths that fill their blocks in different steps.
        prompt = array("i", [index] * (1 + index % config.block_size))
        core.submit(GenerateRequest(RequestId(f"r{index}"), prompt, len(prompt), sampling, index))
    core.step()
    before, began_s, cpu_s = core.stats(), time.perf_counter(), time.process_time()
    while core.has_work:
        core.step()
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    after = core.stats()
    steps = after.num_steps - before.num_steps
    return after.steps_ahead / after.num_steps, took_s / steps - STEP_S, cpu_s / steps
