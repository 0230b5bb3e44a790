"""Several routers beside one, on real replicas: what it costs to hear of each other from the engines alone.

Four replicas of the tiny model serve the same requests once behind one router, once behind each other number
of them, in turns whose order goes round; a round is one workload. What is compared is the mean time to first
token of a round, several routers' over one's: the geometric mean over rounds and its 95 % interval. Steps are
stretched, and what they waited for a core is measured, as in `validate.py`.

Knows what real replicas did; simulates nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from cache.counted import counted
from loadtest.placement.intervals import Interval, paired_ratio
from loadtest.simulation.real_fleet import RealFleet
from loadtest.simulation.validate import (
    CONFIG,
    NUM_REPLICAS,
    NUM_REQUESTS,
    PACE_S,
    conversations,
    fitting_stretch,
    require_quiet,
    stolen_share,
)
from replica.config import ReplicaConfig

LIMIT = 1.02  # mean time to first token behind two routers over that behind one
POLICY = "expected_time"


@dataclass(frozen=True, slots=True)
class Turn:
    """One round's requests behind so many routers."""

    num_routers: int
    mean_ttft_s: float
    hit_ratio: float
    stolen: float  # share of the steps' time in which they waited for a core


@dataclass(frozen=True, slots=True)
class Result:
    """turns: per round, those of every number of routers."""

    turns: tuple[tuple[Turn, ...], ...]

    def of(self, num_routers: int) -> list[Turn]:
        return [turn for turns in self.turns for turn in turns if turn.num_routers == num_routers]

    def beside_one(self, num_routers: int) -> Interval:
        """Mean time to first token over that behind one router, paired by round."""
        ours, ones = self.of(num_routers), self.of(1)
        return paired_ratio([turn.mean_ttft_s for turn in ours], [turn.mean_ttft_s for turn in ones])

    @property
    def stolen(self) -> float:
        """The most of any turn."""
        return max(turn.stolen for turns in self.turns for turn in turns)

    @property
    def holds(self) -> bool:
        return self.beside_one(2).estimate <= LIMIT


def compare_routers(console: Console, counts: Sequence[int], num_rounds: int, binding: str) -> bool:
    """Run everything, print a table; whether two are within `LIMIT` of one.

    counts: numbers of routers beside one; 2 among them. Raises FleetFailed; after the table TooBusy, and then
    nothing is said of the routers.
    """
    result = asyncio.run(measure(console, (1, *counts), num_rounds=num_rounds, binding=binding))
    console.print(_table(result, counts))
    require_quiet(result.stolen)
    verdict = "are within" if result.holds else "are NOT within"
    console.print(f"Two routers {verdict} {100 * (LIMIT - 1):.0f} % of one.")
    return result.holds


async def measure(
    console: Console,
    counts: Sequence[int],
    *,
    num_rounds: int,
    binding: str,
    num_requests: int = NUM_REQUESTS,
    num_replicas: int = NUM_REPLICAS,
    config: ReplicaConfig = CONFIG,
) -> Result:
    """counts: numbers of routers, 1 among them. Raises FleetFailed."""
    num_cores = len(os.sched_getaffinity(0))
    console.print(f"Starting {counted(num_replicas, 'real replica')} on {counted(num_cores, 'core')} ...")
    rounds: list[tuple[Turn, ...]] = []
    async with RealFleet(config, num_replicas) as fleet:
        stretch = await fitting_stretch(fleet, num_replicas)
        console.print(
            f"Each step takes {stretch:.1f} times its processor time, so that none waits for a core."
        )
        fleet.stretch(stretch)
        for number in range(num_rounds):
            # Whoever goes first finds the machine as the round before left it: it is another one each time.
            first = number % len(counts)
            order = (*counts[first:], *counts[:first])
            turns: Mapping[int, Turn] = {
                count: await _turn(fleet, stretch, count, number, binding, num_requests, num_replicas)
                for count in order
            }
            rounds.append(tuple(turns[count] for count in counts))
            told = ", ".join(f"{count}: {1e3 * turns[count].mean_ttft_s:.0f} ms" for count in counts)
            console.print(f"round {number + 1} of {num_rounds}, mean time to first token by routers: {told}")
    return Result(tuple(rounds))


async def _turn(
    fleet: RealFleet,
    stretch: float,
    num_routers: int,
    number: int,
    binding: str,
    num_requests: int,
    num_replicas: int,
) -> Turn:
    workload = conversations(num_requests, pace_s=stretch * PACE_S * NUM_REPLICAS / num_replicas, seed=number)
    run = await fleet.run(
        workload,
        policy=POLICY,
        seed=number,
        salt=f"round {number}, {num_routers} routers",
        binding=binding,
        num_routers=num_routers,
    )
    num_tokens = sum(request.input_tokens for request in workload.requests)
    return Turn(
        num_routers,
        mean_ttft_s=sum(run.ttft_s) / len(run.ttft_s),
        hit_ratio=sum(run.cached_tokens) / num_tokens,
        stolen=stolen_share(run, stretch),
    )


def _table(result: Result, counts: Sequence[int]) -> Table:
    table = Table("routers", "mean TTFT", "over one router's", "hits", "stolen")
    for count in (1, *counts):
        turns = result.of(count)
        table.add_row(
            str(count),
            f"{1e3 * sum(turn.mean_ttft_s for turn in turns) / len(turns):.0f} ms",
            "" if count == 1 else str(result.beside_one(count)),
            f"{100 * sum(turn.hit_ratio for turn in turns) / len(turns):.1f} %",
            f"{100 * max(turn.stolen for turn in turns):.1f} %",
        )
    return table
