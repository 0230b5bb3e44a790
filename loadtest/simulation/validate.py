"""The simulation beside real replicas: the same requests, the same policies, the same order of merit.

Four replicas of the tiny model, each in a process of its own, and a router serve a workload in real time,
once per policy, and once more with late binding, as the default policy ships; engines compute prompts in the
order that ships. The simulation replays it with the step time that was measured meanwhile. It holds if every
mean time to first token is within `TOLERANCE`, and if two policies are in the same order wherever reality is
sure of it (the paired 95 % interval of their difference leaves 0 out), however sure the simulation is.

Replicas that share cores would wait for each other. What they wait is measured first, all of them busy at
once, and steps and arrivals are stretched by twice as much (`real_replica.py`). What they waited nevertheless
is measured too: beyond `MAX_STOLEN` everything is done again at twice the stretch, and if that is not enough
the machine was too busy to say anything, and it is said.

Knows both worlds' results; makes neither.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from cache.counted import counted
from cache.events import StepTimeModel
from cache.scheduling_order import SchedulingOrder
from loadtest.simulation.cell import CellSpec, Floats, Ints
from loadtest.simulation.errors import TooBusy
from loadtest.simulation.machine import Machine
from loadtest.simulation.real_fleet import RealFleet, RealRun
from loadtest.simulation.real_replica import Step
from loadtest.simulation.run import simulate
from loadtest.workloads.reference import WorkloadRef
from loadtest.workloads.request import Workload, WorkRequest
from replica.config import ReplicaConfig

TOLERANCE = 0.15  # of the mean time to first token
NUM_REQUESTS = 300
NUM_REPLICAS = 4
PACE_S = 0.15  # between conversations, unstretched: round robin keeps four replicas busy for two thirds
BLOCK_TOKENS = 32
CONFIG = ReplicaConfig(
    model="tiny",
    device="cpu",
    block_size=BLOCK_TOKENS,
    num_blocks=192,  # 6 k tokens: round robin's copies of everything do not fit
    max_batched_tokens=512,
    max_running=32,
    max_waiting=NUM_REQUESTS,
    max_model_len=4096,
)
MAX_STOLEN = 0.05  # of the time of steps, in which they had waited for a core beyond the stretch
MAX_TRIES = 3


@dataclass(frozen=True, slots=True)
class Form:
    """A policy, and when its requests are dispatched, as the Router's settings have them."""

    policy: str
    binding: str = "at_once"

    @property
    def label(self) -> str:
        return f"{self.policy}+late" if self.binding == "late" else self.policy


FORMS = (
    Form("round_robin"),
    Form("power_of_two"),
    Form("expected_time"),
    Form("expected_time", "late"),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One policy in both worlds. Times per request, in order of arrival, shape (requests,)."""

    label: str
    real_ttft_s: Floats
    simulated_ttft_s: Floats
    real_cached_tokens: Ints
    simulated_cached_tokens: Ints
    num_input_tokens: int  # of all requests
    stolen: float  # share of the real steps' time in which they waited for a core
    busy: float  # share of the time in which a real replica computed

    @property
    def ratio(self) -> float:
        """Simulated mean over real mean."""
        return float(self.simulated_ttft_s.mean() / self.real_ttft_s.mean())

    @property
    def is_close(self) -> bool:
        return abs(self.ratio - 1.0) <= TOLERANCE


def validate(console: Console) -> bool:
    """Run everything (some minutes), print a table; whether the simulation holds.

    Raises FleetFailed; after the table TooBusy, and then nothing is said of the simulation.
    """
    comparisons = asyncio.run(compare(console))
    console.print(_table(comparisons))
    require_quiet(max(comparison.stolen for comparison in comparisons))
    changed = changed_places(comparisons)
    for better, worse in changed:
        console.print(
            f"Order differs: {better} is sooner than {worse} in reality, and not in the simulation."
        )
    holds = all(comparison.is_close for comparison in comparisons) and not changed
    console.print("The simulation holds." if holds else "The simulation does NOT hold.")
    return holds


async def compare(
    console: Console,
    *,
    num_requests: int = NUM_REQUESTS,
    num_replicas: int = NUM_REPLICAS,
    forms: Sequence[Form] = FORMS,
    config: ReplicaConfig = CONFIG,
) -> list[Comparison]:
    """Serve a workload once per form in real time, then simulate it. Raises FleetFailed."""
    num_cores = len(os.sched_getaffinity(0))
    console.print(f"Starting {counted(num_replicas, 'real replica')} on {counted(num_cores, 'core')} ...")
    async with RealFleet(config, num_replicas) as fleet:
        stretch = await fitting_stretch(fleet, num_replicas)
        way_s = await fleet.way_s()
        for attempt in range(1, MAX_TRIES + 1):
            console.print(
                f"Each step takes {stretch:.1f} times its processor time, so that none waits for a core."
            )
            workload = conversations(num_requests, pace_s=stretch * PACE_S * NUM_REPLICAS / num_replicas)
            fleet.stretch(stretch)
            runs = []
            for form in forms:
                console.print(
                    f"{form.label}: {counted(num_requests, 'request')} in {workload.duration_s:.0f} s ..."
                )
                salt = f"{form.label} {attempt}"
                run = await fleet.run(workload, policy=form.policy, binding=form.binding, seed=0, salt=salt)
                runs.append(run)
                if stolen_share(runs[-1], stretch) > MAX_STOLEN and attempt < MAX_TRIES:
                    break
            if len(runs) == len(forms):
                break
            console.print("The machine is busier than it was: once more, twice as slow.")
            stretch *= 2.0
    return [
        _compared(workload, form, run, _spec(form, num_replicas, config, way_s, run), stretch)
        for form, run in zip(forms, runs, strict=True)
    ]


def require_quiet(stolen: float) -> None:
    """Raises TooBusy beyond `MAX_STOLEN`."""
    if stolen > MAX_STOLEN:
        raise TooBusy(stolen)


def stolen_share(run: RealRun, stretch: float) -> float:
    """Share of the steps' time in which they waited for a core beyond the stretch."""
    elapsed_s = sum(step.elapsed_s for step in run.steps)
    return 1.0 - stretch * sum(step.used_s for step in run.steps) / elapsed_s


async def fitting_stretch(fleet: RealFleet, num_replicas: int) -> float:
    """Twice as long as steps take over their processor time with every replica busy; 1 with cores enough.

    Also what warms the replicas up: with it they have measured themselves, as the simulation's have.
    """
    burst = conversations(12 * num_replicas, pace_s=0.0, seed=1)
    run = await fleet.run(burst, policy="round_robin", seed=0, salt="burst")
    waited = sum(step.elapsed_s for step in run.steps) / sum(step.used_s for step in run.steps)
    return 2.0 * waited if waited > 1.1 else 1.0


def _spec(form: Form, num_replicas: int, config: ReplicaConfig, way_s: float, run: RealRun) -> CellSpec:
    model = fit(run.steps)
    assert config.num_blocks is not None
    return CellSpec(
        WorkloadRef("validation"),
        num_replicas=num_replicas,
        load=1.0,
        seed=0,
        policy=form.policy,
        router_options=(("binding", form.binding),),
        cache_tokens=config.num_blocks * config.block_size,
        event_delay_s=way_s,
        dispatch_delay_s=way_s,  # and back
        machine=Machine(
            base_s=model.base_s,
            per_token_s=model.per_token_s,
            per_attention_s=model.per_attention_s,
            per_sequence_s=model.per_sequence_s,
            max_batched_tokens=config.max_batched_tokens,
            max_running=config.max_running,
            max_model_len=config.max_model_len or 1 << 20,
            scheduling_order=SchedulingOrder(config.scheduling_order),
            itl_target_s=config.itl_target_s,
        ),
    )


def _compared(workload: Workload, form: Form, run: RealRun, spec: CellSpec, stretch: float) -> Comparison:
    result = simulate(workload, spec)
    num_tokens = sum(request.input_tokens for request in workload.requests)
    elapsed_s = sum(step.elapsed_s for step in run.steps)
    return Comparison(
        form.label,
        real_ttft_s=np.array(run.ttft_s),
        simulated_ttft_s=result.ttft_s,
        real_cached_tokens=np.array(run.cached_tokens),
        simulated_cached_tokens=result.cached_tokens,
        num_input_tokens=num_tokens,
        stolen=stolen_share(run, stretch),
        busy=elapsed_s / spec.num_replicas / workload.duration_s,
    )


def fit(steps: Sequence[Step]) -> StepTimeModel:
    """The step-time model with the least squared error over these steps, no term negative.

    Of all steps alike, unlike the engine's own fit, which forgets: this is to replay a whole run.
    """
    rows = np.array([(1.0, *step.work) for step in steps])
    seconds = np.array([step.elapsed_s for step in steps])
    best, best_error = np.zeros(4), math.inf
    for size in range(1, 5):
        for columns in itertools.combinations(range(4), size):
            chosen = list(columns)
            terms, *_ = np.linalg.lstsq(rows[:, chosen], seconds, rcond=None)
            error = float(((rows[:, chosen] @ terms - seconds) ** 2).sum())
            if (terms >= 0).all() and error < best_error:
                best, best_error = np.zeros(4), error
                best[chosen] = terms
    return StepTimeModel(*map(float, best))


def changed_places(comparisons: Sequence[Comparison]) -> list[tuple[str, str]]:
    """Pairs, the one that is surely sooner in reality first, which the simulation has not in that order.

    Of the simulation the mean counts: one that cannot tell them apart, where reality can, is no model of it.
    """
    return [
        (one.label, other.label)
        for one, other in itertools.permutations(comparisons, 2)
        if _is_surely_sooner(one.real_ttft_s, other.real_ttft_s)
        and one.simulated_ttft_s.mean() >= other.simulated_ttft_s.mean()
    ]


def _is_surely_sooner(one: Floats, other: Floats) -> bool:
    """The whole 95 % interval of the mean of one - other, paired by request, is below 0."""
    differences = one - other
    margin = 1.96 * differences.std(ddof=1) / math.sqrt(len(differences))
    return bool(differences.mean() + margin < 0)


def conversations(num_requests: int, *, pace_s: float, seed: int = 0) -> Workload:
    """Short conversations over a few system prompts, one starting every `pace_s` seconds on average.

    No answer is part of a later prompt: what the tiny model says, the workload cannot know.
    """
    draw = random.Random(f"{seed} validation")
    fresh = itertools.count()
    systems = [_blocks(fresh, 3) for _ in range(6)]
    requests: list[WorkRequest] = []
    starts_s = 0.0
    while len(requests) < 2 * num_requests:
        starts_s += draw.expovariate(1.0) * pace_s
        time_s, prompt = starts_s, draw.choice(systems)
        for _ in range(draw.randint(1, 6)):
            tokens = len(prompt) * BLOCK_TOKENS + draw.randint(30, 300)
            blocks = prompt + _blocks(fresh, -(-tokens // BLOCK_TOKENS) - len(prompt))
            # A session of its own: none of them goes on from another's answer.
            requests.append(WorkRequest(time_s, tokens, draw.randint(2, 10), blocks, len(requests)))
            prompt = blocks[: tokens // BLOCK_TOKENS]
            time_s += (2.0 + draw.expovariate(0.5)) * pace_s
    requests.sort(key=lambda request: request.arrival_s)
    return Workload("validation", BLOCK_TOKENS, tuple(requests)).window(0.0, num_requests)


def _blocks(fresh: itertools.count[int], count: int) -> tuple[int, ...]:
    return tuple(itertools.islice(fresh, count))


def _table(comparisons: Sequence[Comparison]) -> Table:
    table = Table("policy", "real TTFT", "simulated", "ratio", "real hits", "simulated", "busy", "stolen", "")
    for one in comparisons:
        table.add_row(
            one.label,
            f"{1e3 * one.real_ttft_s.mean():.0f} ms",
            f"{1e3 * one.simulated_ttft_s.mean():.0f} ms",
            f"{one.ratio:.3f}",
            f"{100 * one.real_cached_tokens.sum() / one.num_input_tokens:.1f} %",
            f"{100 * one.simulated_cached_tokens.sum() / one.num_input_tokens:.1f} %",
            f"{100 * one.busy:.0f} %",
            f"{100 * one.stolen:.1f} %",
            "" if one.is_close else f"beyond {100 * TOLERANCE:.0f} %",
        )
    return table
