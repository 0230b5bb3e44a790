"""What a replica tells of the work there is, in virtual time."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from cache.events import Load, StepTimeModel
from cache.kv_cache_manager import CacheStats
from replica.demand import BUSY_KEY, HELD_KEY, QUEUED_KEY, REFUSED_KEY, REFUSED_MEMORY_S, Demand, queued_s
from replica.engine.engine_stats import EngineStats
from tests.fakes.engine import VirtualClock

EMPTY = CacheStats(100, 100, 0, cached=0, pinned=0)
PACE = StepTimeModel(base_s=0.01, per_token_s=0.001, per_attention_s=1e-6, per_sequence_s=0.002)


def stats(cache: CacheStats = EMPTY, *, prompt_s: float = 0.0, computed_tokens: int = 0) -> EngineStats:
    return EngineStats(cache, 0, 0, computed_tokens, 0, 0, prompt_s=prompt_s)


class Replica:
    """An engine that does what a test says."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.now = Load(step_time=PACE)
        self.prompt_s = 0.0
        self.used_blocks = self.pinned_blocks = 0
        self.demand = Demand(
            self, max_running=10, max_batched_tokens=100, block_size=16, clock=lambda: self.clock.now_s
        )

    def load(self) -> Load:
        return self.now

    def stats(self) -> EngineStats:
        free = 100 - self.used_blocks
        cache = CacheStats(100, free, self.used_blocks, cached=0, pinned=self.pinned_blocks)
        return stats(cache, prompt_s=self.prompt_s)


def test_an_idle_replica_wants_nothing() -> None:
    assert Replica().demand.stats() == {QUEUED_KEY: 0.0, HELD_KEY: 0.0, BUSY_KEY: 0.0, REFUSED_KEY: 0.0}


def test_queued_prompts_are_seconds_by_the_engines_own_pace() -> None:
    """250 tokens in three steps of at most 100, of two prompts, by hand."""
    load = Load(queued_uncached_tokens=250, queued_attention=20_000, num_waiting=2, step_time=PACE)
    assert queued_s(load, 100, stats()) == pytest.approx(3 * 0.01 + 0.25 + 0.02 + 3 * 0.002)
    without_pairs = Load(queued_uncached_tokens=200, num_waiting=2, step_time=PACE)
    assert queued_s(without_pairs, 1000, stats()) == pytest.approx(
        0.01 + 0.2 + 1e-6 * 200 * 200 / 4 + 2 * 0.002
    )
    unfitted = Load(queued_uncached_tokens=250)
    assert queued_s(unfitted, 100, stats()) == 0.0  # nothing computed: nobody knows how fast it is
    assert queued_s(unfitted, 100, stats(prompt_s=2.0, computed_tokens=1000)) == pytest.approx(0.5)


def test_what_routers_hold_counts_down_as_it_is_worked_off() -> None:
    replica = Replica()
    replica.demand.told(3.0, 0.0)
    replica.clock.sleep(1.0)
    assert replica.demand.stats()[HELD_KEY] == pytest.approx(2.0)
    replica.demand.told(0.5, 0.0)  # the freshest, be it less
    assert replica.demand.stats()[HELD_KEY] == pytest.approx(0.5)
    replica.clock.sleep(60.0)
    assert replica.demand.stats()[HELD_KEY] == 0.0


def test_busy_is_the_scarcest_of_time_places_and_blocks() -> None:
    replica = Replica()
    replica.clock.sleep(2.0)
    replica.prompt_s += 0.5
    assert replica.demand.stats()[BUSY_KEY] == pytest.approx(0.25)
    assert replica.demand.stats()[BUSY_KEY] == pytest.approx(0.25)  # no time has passed: what was seen last
    replica.now = Load(num_running=6)
    assert replica.demand.stats()[BUSY_KEY] == pytest.approx(0.6)
    replica.used_blocks = 60  # by six of nine that there is room for
    assert replica.demand.stats()[BUSY_KEY] == pytest.approx(6 / 9)
    replica.used_blocks, replica.now = 90, Load()
    assert replica.demand.stats()[BUSY_KEY] == pytest.approx(0.9)
    replica.pinned_blocks = 80  # held prefixes are no work: ten of the other twenty are used
    assert replica.demand.stats()[BUSY_KEY] == pytest.approx(0.5)
    replica.used_blocks = 95
    assert replica.demand.stats()[BUSY_KEY] == pytest.approx(0.75)
    replica.used_blocks = replica.pinned_blocks
    replica.clock.sleep(1.0)
    replica.prompt_s += 1.5  # a step that began before the last look
    told = []
    for _ in range(3):
        told.append(replica.demand.stats()[BUSY_KEY])
        replica.clock.sleep(1.0)
    assert told == [1.0, 0.5, 0.0]  # none of it is lost


@pytest.mark.parametrize(
    ("num_running", "used_blocks", "busy"),
    [
        pytest.param(1, 53, 1.0, id="one, and no other like it fits"),
        pytest.param(1, 49, 1.0, id="nor beside the blocks that are kept free"),
        pytest.param(1, 40, 0.5, id="one of two"),
        pytest.param(2, 72, 1.0, id="two of two"),
        pytest.param(3, 72, 0.75, id="three of four"),
        pytest.param(8, 24, 0.8, id="eight of ten places"),
    ],
)
def test_blocks_in_which_no_other_fits_are_as_good_as_used(
    num_running: int, used_blocks: int, busy: float
) -> None:
    """With one long prompt running and no room for a second 0.53 was told, while Routers refused the rest."""
    replica = Replica()
    replica.now, replica.used_blocks = Load(num_running=num_running), used_blocks
    assert replica.demand.stats()[BUSY_KEY] == pytest.approx(busy)


@pytest.mark.parametrize(("queued", "busy"), [(16 * 30, 0.6), (16 * 30 + 1, 1.0)])
def test_a_replica_is_busy_while_prompts_wait_for_blocks(queued: int, busy: float) -> None:
    """Many short ones run, and a long one does not fit into what is free beside their answers."""
    replica = Replica()
    replica.used_blocks = 60
    waiting = Load(queued_uncached_tokens=queued, num_waiting=1, free_blocks=40, growth_blocks=10)
    replica.now = waiting
    assert replica.demand.stats()[BUSY_KEY] == pytest.approx(busy)
    replica.now = replace(waiting, num_waiting=0)  # let in, and not computed yet
    assert replica.demand.stats()[BUSY_KEY] == pytest.approx(0.6)


def test_what_routers_refused_is_forgotten() -> None:
    replica = Replica()
    replica.demand.told(0.0, 2.0)
    assert replica.demand.stats()[REFUSED_KEY] == pytest.approx(2.0)
    replica.clock.sleep(REFUSED_MEMORY_S)
    assert replica.demand.stats()[REFUSED_KEY] == pytest.approx(2.0 / math.e)
    replica.demand.told(0.0, 0.5)  # the freshest, be it less
    assert replica.demand.stats()[REFUSED_KEY] == pytest.approx(0.5)
    replica.clock.sleep(600.0)
    assert replica.demand.stats()[REFUSED_KEY] == pytest.approx(0.0, abs=1e-9)
