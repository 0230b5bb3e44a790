"""Two tenants on one engine: what the one that asks for ten times its share does to the other.

Under a virtual clock: the engine alone, and behind a Router that holds requests back until their turn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np

from benchmarks.schedule.routed_engine import run_routed
from benchmarks.schedule.rows import Advance, Line, Section
from benchmarks.schedule.virtual_engine import Job, Outcome, run
from cache.events import StepTimeModel
from loadtest.simulation.machine import H100_8B

TARGET = 1.5  # times the other's p99 to first token while nobody asks for too much
SHARE = 0.4  # of capacity, each: together a busy engine, and none that is overloaded
FLOOD = 10.0  # times its share
SECONDS, SATURATED_S = 150.0, 40.0
EDGE_S = 30.0  # left out at both ends: queues are made, and not all answers waited for
NUM_BLOCKS = 25_000  # 0.4 M tokens: what the card holds beside the weights
MODEL = H100_8B.step_time()


class Serve(Protocol):
    def __call__(
        self, jobs: Sequence[Job], model: StepTimeModel, *, num_blocks: int, until_s: float
    ) -> Outcome:
        """All of them, in order of arrival."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The tenant that keeps to its share."""

    median_s: float  # to first token
    p99_s: float
    num_refused: int
    num_requests: int


def measure(advance: Advance, seeds: int) -> Section:
    """Medians over seeds; ratios seed by seed."""
    section = Section(
        f"One tenant at {FLOOD:g} times its share, another at its own ({SHARE:.0%} of capacity)",
        ("the other's median, ms", "p99, ms", "ratio", "refused"),
    )
    advance("capacity")
    capacity = _capacity()
    for where, serve in (("", run), ("Router: ", run_routed)):
        _measure(section, advance, where, serve, capacity, seeds)
    return section


def _measure(
    section: Section, advance: Advance, where: str, serve: Serve, capacity: float, seeds: int
) -> None:
    cases = (
        (f"{where}both at their share", 1.0, True),
        (f"{where}{FLOOD:g} times, told apart", FLOOD, True),
        (f"{where}{FLOOD:g} times, not told apart", FLOOD, False),
    )
    found: list[list[Neighbour]] = []
    for name, factor, are_known in cases:
        advance(f"tenants, {name}")
        found.append([_neighbour(serve, capacity, factor, are_known, seed) for seed in range(seeds)])
    calm = found[0]
    for (name, factor, are_known), each in zip(cases, found, strict=True):
        ratio = median(with_it.p99_s / alone.p99_s for with_it, alone in zip(each, calm, strict=True))
        cells = (
            f"{1000 * median(n.median_s for n in each):.0f}",
            f"{1000 * median(n.p99_s for n in each):.0f}",
            f"{ratio:.2f}x",
            f"{sum(n.num_refused for n in each)} of {sum(n.num_requests for n in each)}",
        )
        is_judged = factor > 1 and are_known
        target = f"at most {TARGET:.1f}x" if is_judged else ""
        section.lines.append(Line(name, cells, target, not is_judged or ratio <= TARGET))


def _neighbour(serve: Serve, capacity: float, factor: float, are_known: bool, seed: int) -> Neighbour:
    """are_known: whether engine and Router are told whose the requests are."""
    rate = SHARE * capacity
    jobs = sorted(
        [*_jobs("greedy", factor * rate, are_known, seed), *_jobs("calm", rate, are_known, seed)],
        key=lambda job: job.arrival_s,
    )
    outcome = serve(jobs, MODEL, num_blocks=NUM_BLOCKS, until_s=SECONDS)
    waits = [
        wait_s
        for job, wait_s in zip(jobs, outcome.first_token_s, strict=True)
        if job.sender == "calm" and EDGE_S <= job.arrival_s < SECONDS - EDGE_S
    ]
    served = [wait_s for wait_s in waits if wait_s < math.inf]
    return Neighbour(
        float(np.median(served)), float(np.quantile(served, 0.99)), len(waits) - len(served), len(waits)
    )


def _jobs(sender: str, rate: float, are_known: bool, seed: int) -> Iterator[Job]:
    """Poisson arrivals; the same ones at every rate of the other sender."""
    draw, now_s = random.Random(f"{sender} {seed}"), 0.0
    while (now_s := now_s + draw.expovariate(rate)) < SECONDS:
        yield Job(now_s, *_lengths(draw), sender, sender if are_known else "")


def _lengths(draw: random.Random) -> tuple[int, int]:
    """Prompt and answer, tokens."""
    return 16 + int(min(8000.0, draw.lognormvariate(6.6, 0.8))), draw.randint(20, 200)


def _capacity() -> float:
    """Requests per second of an engine that always has more to do."""
    draw = random.Random("capacity")
    jobs = [Job(SATURATED_S * i / 4000, *_lengths(draw), "", "") for i in range(4000)]
    return run(jobs, MODEL, num_blocks=NUM_BLOCKS, until_s=SATURATED_S).num_ended / SATURATED_S
