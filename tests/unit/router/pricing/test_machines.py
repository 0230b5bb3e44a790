"""What a replica that begins to work takes from others on its machine."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from cache.events import StepTimeModel
from cache.types import RequestId
from router.pricing.fleet_load import FleetLoad
from router.pricing.machines import Machine, alone_s
from router.pricing.replica_load import Reservation
from tests.fakes.router import STEP_TIME, FakeClock, info, load, replica_id

REPLICAS = [replica_id(index) for index in range(4)]
A, B, C, D = REPLICAS


class Sharer:
    """Counts how often its neighbours changed."""

    def __init__(self) -> None:
        self.num_changes = 0

    def neighbours_changed(self) -> None:
        self.num_changes += 1


@pytest.mark.parametrize(
    ("num_engines", "expected"),
    [(1.0, [0.0, 1.0, 1.0, 1.0]), (1.2, [0.0, 0.8, 1.0, 1.0]), (2.0, [0.0, 0.0, 1.0, 1.0]), (4.0, [0.0] * 4)],
)
def test_a_machine_is_crowded_when_more_compute_than_it_has_room_for(
    num_engines: float, expected: list[float]
) -> None:
    machine, sharers = Machine(), [Sharer() for _ in range(4)]
    for sharer in sharers:
        machine.enter(sharer)
    *others, last = sharers
    found = [machine.crowding(last, num_engines)]
    for other in others:
        machine.note(other, is_busy=True)
        found.append(machine.crowding(last, num_engines))
    assert found == pytest.approx(expected)
    machine.note(last, is_busy=True)
    assert machine.crowding(last, num_engines) == found[-1], "its own work is none of the others'"


def test_the_others_hear_of_what_is_new_and_of_nothing_else() -> None:
    machine, one, other = Machine(), Sharer(), Sharer()
    machine.enter(one)
    machine.enter(other)
    for is_busy in (False, True, True, False, False):
        machine.note(one, is_busy=is_busy)
    assert (one.num_changes, other.num_changes) == (0, 2)


def test_who_has_left_is_not_waited_for() -> None:
    machine, one, other = Machine(), Sharer(), Sharer()
    machine.enter(one)
    machine.enter(other)
    machine.note(one, is_busy=True)
    assert machine.crowding(other, 1.0) == 1.0
    machine.leave(one)
    machine.leave(one)
    assert machine.crowding(other, 1.0) == 0.0
    machine.note(one, is_busy=True)  # its requests end, or are sent again, after it has left
    assert machine.crowding(other, 1.0) == 0.0


# 10 ms a step, 0.1 ms a token and 1 ms a sequence: one that decodes alone takes 11.1 ms a step.
def test_alone_a_newcomer_takes_what_steps_cost_anyway_for_as_long_as_it_stays() -> None:
    assert alone_s(STEP_TIME, 0.0, 0, 1.11) == pytest.approx(1.0)
    assert alone_s(STEP_TIME, 0.0, 3, 1.11) == pytest.approx(0.25)
    # Beside 10 that take 11 ms of each step: 10 of 21 ms, and an eleventh of its stay.
    assert alone_s(STEP_TIME, 0.011, 10, 2.1) == pytest.approx(1.0 / 11)


def test_nothing_is_known_of_stays_before_one_has_ended() -> None:
    assert alone_s(STEP_TIME, 0.0, 0, 0.0) == 0.0
    assert alone_s(StepTimeModel(0.0, 0.0, 1e-9, 0.0), 0.0, 0, 1.0) == 0.0


def test_the_last_of_one_more_ends_a_share_of_its_stay_later() -> None:
    """The law behind `alone_s`, drawn: exponential stays of 1 s."""
    draw = random.Random(7)
    for num_before in (0, 1, 4):
        later = []
        for _ in range(20_000):
            last = max([draw.expovariate(1.0) for _ in range(num_before)], default=0.0)
            later.append(max(0.0, draw.expovariate(1.0) - last))
        assert fmean(later) == pytest.approx(1.0 / (num_before + 1), rel=0.05)


class Fleet:
    """Four replicas of one machine, which computes two at a time. Sequences stay for 1.11 s."""

    def __init__(self, machine: str = "m", crowding_weight: float = 1.0) -> None:
        self.clock = FakeClock()
        self.loads = FleetLoad(
            self.clock, reservation_ttl_s=600.0, silent_after_s=5.0, crowding_weight=crowding_weight
        )
        for name in REPLICAS:
            self.loads.add_replica(name, info(machine=machine, machine_engines=2.0))
            self.loads.report(name, load())
        self.loads.residence.observe(1.11)
        self.num_sent = 0

    def send(self, name: str) -> RequestId:
        self.num_sent += 1
        request_id = RequestId(f"request-{self.num_sent}")
        self.loads.reserve(replica_id(int(name[1:])), Reservation(request_id, 1, 0, 1, self.clock()))
        return request_id

    def alone_s(self) -> list[float]:
        return [self.loads.view(name).alone_s for name in REPLICAS]


def test_a_third_engine_of_two_cores_pays_for_the_steps_it_would_begin() -> None:
    fleet = Fleet()
    assert fleet.alone_s() == [0.0] * 4
    fleet.send(A)
    assert fleet.alone_s() == [0.0] * 4, "there is room for another one"
    ended = fleet.send(B)
    assert fleet.alone_s() == pytest.approx([0.0, 0.0, 1.0, 1.0])
    fleet.send(C)  # at all costs
    assert fleet.alone_s() == pytest.approx([0.5, 0.5, 0.5, 1.0])
    fleet.loads.release(ended)
    assert fleet.alone_s() == pytest.approx([0.0, 1.0, 0.0, 1.0])


def test_what_engines_tell_counts_as_what_was_sent() -> None:
    fleet = Fleet()
    for name in (A, B):
        fleet.loads.report(name, load(num_running=1))
    assert fleet.alone_s()[2:] == pytest.approx([1.0, 1.0])
    fleet.loads.report(A, load())
    assert fleet.alone_s() == [0.0] * 4
    fleet.loads.report(A, load(num_waiting=1, queued_uncached_tokens=9))
    assert fleet.alone_s()[2:] == pytest.approx([1.0, 1.0])
    fleet.loads.remove_replica(A)
    assert [fleet.loads.view(name).alone_s for name in (B, C, D)] == [0.0] * 3


def test_who_has_a_machine_of_its_own_pays_nothing() -> None:
    fleet = Fleet(machine="")
    for name in REPLICAS[:3]:
        fleet.send(name)
    assert fleet.alone_s() == [0.0] * 4


def test_a_weight_of_nothing_leaves_it_out() -> None:
    fleet = Fleet(crowding_weight=0.0)
    for name in REPLICAS[:3]:
        fleet.send(name)
    assert fleet.alone_s() == [0.0] * 4


def test_replicas_of_other_threads_take_the_machine_as_they_need_it() -> None:
    """A rolling redeploy with another `torch_threads`: the old are told of two at once, the new of one."""
    fleet = Fleet()
    for name in (C, D):
        fleet.loads.remove_replica(name)
        fleet.loads.add_replica(name, info(machine="m", machine_engines=1.0))
        fleet.loads.report(name, load())
    fleet.send(A)
    assert fleet.alone_s() == pytest.approx([0.0, 0.0, 1.0, 1.0])
