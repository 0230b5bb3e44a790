"""What the autoscaling policy hears of work that several Routers hold, in virtual time: a sum, no flapping.

Each request brings along what its own Router holds, times the number of Routers. Real `Demand`s hear it,
Serve averages them as it does, and the policy decides.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from statistics import fmean
from types import SimpleNamespace

import pytest

from cache.events import Load
from cache.kv_cache_manager import CacheStats
from deploy.autoscaling import fleet_of
from deploy.wanted_replicas import Fleet, Targets, wanted_replicas
from replica.demand import BUSY_KEY, HELD_KEY, QUEUED_KEY, Demand
from replica.engine.engine_stats import EngineStats
from tests.fakes.engine import VirtualClock

LOOK_BACK_S, ASKED_EVERY_S = 30.0, 10.0  # Serve's own
REQUEST_S = 0.25  # of one replica's time
SECONDS = 600


class Busy:
    """An engine that computes prompts all the time."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def load(self) -> Load:
        return Load()

    def stats(self) -> EngineStats:
        cache = CacheStats(100, 100, 0, cached=0, pinned=0)
        return EngineStats(cache, 0, 0, 0, 0, 0, prompt_s=self._clock.now_s)


def heard(held_s: Sequence[float], num_replicas: int, *, seed: int) -> Iterator[float]:
    """Seconds of work that wait for each replica, as the policy hears it each second.

    held_s: what each Router holds, all the time: as much comes as is computed. Requests leave a Router in
    proportion to that.
    """
    clock, draw = VirtualClock(), random.Random(seed)
    demands = [
        Demand(Busy(clock), max_running=64, max_batched_tokens=512, block_size=16, clock=lambda: clock.now_s)
        for _ in range(num_replicas)
    ]
    told: list[list[tuple[float, dict[str, float]]]] = [[] for _ in demands]
    asked_at = [draw.uniform(0, ASKED_EVERY_S) for _ in demands]
    for step in range(int(SECONDS / REQUEST_S)):
        for demand in demands:
            router = draw.choices(range(len(held_s)), weights=held_s)[0]
            demand.told(held_s[router] * len(held_s) / num_replicas, 0.0)
        clock.sleep(REQUEST_S)
        for index, demand in enumerate(demands):
            if clock.now_s >= asked_at[index]:
                asked_at[index] += ASKED_EVERY_S
                told[index].append((clock.now_s, demand.stats()))
        if clock.now_s > LOOK_BACK_S and step % 4 == 0:
            yield _as_the_policy_hears_it(told, clock.now_s)


def _as_the_policy_hears_it(told: list[list[tuple[float, dict[str, float]]]], now: float) -> float:
    metrics = {
        key: {
            str(index): fmean(stats[key] for at, stats in each if at > now - LOOK_BACK_S)
            for index, each in enumerate(told)
        }
        for key in (QUEUED_KEY, HELD_KEY, BUSY_KEY)
    }
    context = SimpleNamespace(
        aggregated_metrics=metrics,
        current_num_replicas=len(told),
        target_num_replicas=len(told),
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=100,
    )
    return fleet_of(context).queued_s / len(told)


@pytest.mark.parametrize("num_routers", [1, 2, 3])
@pytest.mark.parametrize("num_replicas", [1, 4])
def test_what_routers_hold_alike_is_summed(num_routers: int, num_replicas: int) -> None:
    """Serve's proxies give each Router as much. 8 s for each replica, however many Routers hold them."""
    held_s = [8.0 * num_replicas / num_routers] * num_routers
    for number in heard(held_s, num_replicas, seed=1):
        assert number == pytest.approx(8.0, abs=REQUEST_S)


@pytest.mark.parametrize("part", [0.6, 0.7, 0.9])
def test_uneven_routers_are_told_too_high_by_no_more_than_their_number(part: float) -> None:
    """A Router does not know what another holds. Never too low by more than noise."""
    numbers = list(heard([8.0 * 4 * part, 8.0 * 4 * (1 - part)], 4, seed=2))
    assert 8.0 * 0.9 < fmean(numbers)
    assert max(numbers) <= 2 * 8.0


@pytest.mark.parametrize("part", [0.5, 0.7])
@pytest.mark.parametrize("waits_s", [0.3, 0.9, 1.5])
def test_the_number_goes_one_way(part: float, waits_s: float) -> None:
    """Under a load that stays the same, whatever the Routers' parts: up, or down, or neither; not both."""
    ways = set()
    for queued_s in heard([waits_s * 4 * part, waits_s * 4 * (1 - part)], 4, seed=3):
        fleet = Fleet(4, 4, num_silent=0, queued_s=4 * queued_s, busy=4 * 0.7, refused=0.0, least=1, most=100)
        number = wanted_replicas(fleet, Targets())
        ways.add((number > 4) - (number < 4))
    assert not {1, -1} <= ways
