"""Under a load that stays the same there are enough replicas in the end, whatever they are short of.

Production's Routers, admission, scheduler and policy in virtual time. Routers refuse what would wait too
long, so that no queue is long and no replica need look busy: what is refused has to be heard of.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace
from statistics import fmean
from types import SimpleNamespace

import pytest

from cache.events import Load
from cache.types import ReplicaId
from deploy.autoscaling import fleet_of
from deploy.wanted_replicas import Targets, wanted_replicas
from loadtest.simulation.cell import CellSpec
from loadtest.simulation.engine import SimEngine
from loadtest.simulation.machine import Machine
from loadtest.simulation.router_node import RouterNode
from loadtest.simulation.turns import Turn
from loadtest.workloads.request import Workload
from replica.demand import BUSY_KEY, HELD_KEY, QUEUED_KEY, REFUSED_KEY, Demand
from replica.engine.engine_stats import EngineStats
from router.placement.held import HeldRequests
from tests.fakes.simulation import BLOCK_TOKENS
from tests.integration.test_overload import MACHINE, Refusing, Shape, long_answers, spec_of, workload_of

ASKED_EVERY_S, LOOK_BACK = 2.0, 10  # looks that are averaged
UP_DELAY, DOWN_DELAY = 5, 15  # looks of the same opinion
START_S = 4.0  # until a replica that is wanted serves
MOST = 60
BEGIN_S, SECONDS = 60.0, 260.0  # by when it is overload, and Routers keep queues short; altogether


@dataclass
class Seat:
    """A replica's engine, as it is asked there."""

    engine: SimEngine

    def load(self) -> Load:
        return self.engine.scheduler.load()

    def stats(self) -> EngineStats:
        return EngineStats(self.engine._cache.stats(), 0, 0, 0, 0, 0, prompt_s=self.engine.prompt_s)


class Scaled(Refusing):
    """As many replicas as are wanted. comes_back: who was refused asks again, when it was told to."""

    def __init__(self, workload: Workload, spec: CellSpec, *, comes_back: bool = False) -> None:
        super().__init__(workload, spec)
        self.numbers: list[int] = []  # wanted, at each look
        self._demands: dict[ReplicaId, Demand] = {}
        self._told: dict[ReplicaId, deque[dict[str, float]]] = {}
        self._opinions: deque[int] = deque(maxlen=max(UP_DELAY, DOWN_DELAY))
        self._target = spec.num_replicas
        self._comes_back = comes_back
        self._refused_at: list[float] = []

    def run_until(self, end_s: float) -> None:
        for _ in range(self._spec.num_replicas):
            self._seats.append(self._start_replica(1.0))
        self._tell_members()
        for turn in self._turns:
            self._queue.at(turn.work.arrival_s, self._arrive, turn)
        self._queue.at(BEGIN_S, self._look)
        while self._queue.now < end_s:
            self._queue.step()

    def _refused(self, after_s: float, turn: Turn, num_output: int, excluded: frozenset[ReplicaId]) -> None:
        super()._refused(after_s, turn, num_output, excluded)
        self._refused_at.append(self._queue.now)
        if self._comes_back:
            again_s = self._queue.now + after_s
            self._queue.at(again_s, self._arrive, replace(turn, work=replace(turn.work, arrival_s=again_s)))

    def _start_replica(self, slowdown: float) -> SimEngine:
        engine = super()._start_replica(slowdown)
        machine = self._spec.machine
        self._demands[engine.replica_id] = Demand(
            Seat(engine),
            max_running=machine.max_running,
            max_batched_tokens=machine.max_batched_tokens,
            block_size=BLOCK_TOKENS,
            clock=self._queue,
        )
        self._told[engine.replica_id] = deque(maxlen=LOOK_BACK)
        return engine

    def _deliver(self, router: RouterNode, turn: Turn, num_output: int, replica_id: ReplicaId) -> None:
        """As `Generation._request` has it."""
        placer = router._placer
        held_s = placer.engine_s if isinstance(placer, HeldRequests) else placer.held_s
        self._demands[replica_id].told(router.routing.share_s(held_s), placer.refused_ratio)
        super()._deliver(router, turn, num_output, replica_id)

    def _look(self) -> None:
        names = [engine.replica_id for engine in self._seats]
        for name in names:
            self._told[name].append(self._demands[name].stats())
        metrics = {
            key: {name: fmean(stats[key] for stats in self._told[name]) for name in names}
            for key in (QUEUED_KEY, HELD_KEY, BUSY_KEY, REFUSED_KEY)
        }
        context = SimpleNamespace(
            aggregated_metrics=metrics,
            current_num_replicas=len(names),
            target_num_replicas=self._target,
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=MOST,
        )
        self._decide(wanted_replicas(fleet_of(context), Targets()))
        self.numbers.append(self._target)
        self._queue.at(self._queue.now + ASKED_EVERY_S, self._look)

    def _decide(self, wanted: int) -> None:
        self._opinions.append(wanted)
        opinions = list(self._opinions)
        ups, downs = opinions[-UP_DELAY:], opinions[-DOWN_DELAY:]
        if len(ups) == UP_DELAY and min(ups) > self._target:
            self._target = wanted
        elif len(downs) == DOWN_DELAY and max(downs) < self._target:
            self._target = wanted
        else:
            return
        self._opinions.clear()
        wait_s = START_S if self._target > len(self._seats) else 0.0
        self._queue.at(self._queue.now + wait_s, self._scale, self._target)

    def num_refused(self, begin_s: float) -> int:
        """Since then."""
        return sum([at_s >= begin_s for at_s in self._refused_at])


def scaled(
    shape: Shape,
    machine: Machine,
    rate_per_s: float,
    *,
    cache_tokens: int,
    start: int,
    comes_back: bool = False,
) -> Scaled:
    draw, arrivals, now = random.Random(3), [], 0.0
    while (now := now + draw.expovariate(rate_per_s)) < SECONDS:
        arrivals.append(now)
    workload = workload_of(arrivals, [shape(draw) for _ in arrivals])
    spec = replace(spec_of(machine), num_replicas=start, cache_tokens=cache_tokens)
    cluster = Scaled(workload, spec, comes_back=comes_back)
    cluster.run_until(SECONDS)
    return cluster


def long_prompts(draw: random.Random) -> tuple[int, int]:
    """Half a second each, alone."""
    return draw.randint(1500, 2500), draw.randint(6, 18)


def one_that_fits(draw: random.Random) -> tuple[int, int]:
    """More than half of 4,096 tokens of cache, for four seconds, of which it computes its prompt in one."""
    return draw.randint(2200, 2700), draw.randint(30, 50)


def two_that_fit(draw: random.Random) -> tuple[int, int]:
    return draw.randint(1500, 1600), draw.randint(30, 50)


SLOW = replace(MACHINE, base_s=0.05, max_running=16)
SMALL, LARGE = 1 << 12, 1 << 16  # caches, tokens
BROAD = (pytest.mark.long, pytest.mark.broad)


@pytest.mark.parametrize(
    ("shape", "machine", "cache_tokens", "rate_per_s", "start", "comes_back"),
    [
        pytest.param(
            long_prompts, MACHINE, LARGE, 6.0, 1, False, id="three times the time there is", marks=BROAD
        ),
        pytest.param(
            long_prompts, MACHINE, LARGE, 6.0, 1, True, id="and the refused come back", marks=pytest.mark.long
        ),
        pytest.param(one_that_fits, SLOW, SMALL, 2.0, 2, False, id="room for one prompt each"),
        pytest.param(two_that_fit, SLOW, SMALL, 3.0, 2, False, id="room for two prompts each", marks=BROAD),
        pytest.param(long_answers, replace(SLOW, max_running=4), LARGE, 4.0, 2, False, id="few places"),
    ],
)
def test_a_constant_load_settles_with_enough_replicas(
    shape: Shape, machine: Machine, cache_tokens: int, rate_per_s: float, start: int, comes_back: bool
) -> None:
    """Two for what needs several times as many: up until nobody is refused, and from there down at most."""
    cluster = scaled(
        shape, machine, rate_per_s, cache_tokens=cache_tokens, start=start, comes_back=comes_back
    )
    assert cluster.num_refused(0.0) > 20
    assert cluster.num_refused(BEGIN_S + 60.0) == 0
    numbers = cluster.numbers
    top = numbers.index(max(numbers))
    assert numbers[: top + 1] == sorted(numbers[: top + 1])
    assert numbers[top:] == sorted(numbers[top:], reverse=True)
    assert max(numbers) < MOST
