"""What each replica is priced by, as fits come and move."""

from __future__ import annotations

import pytest

from cache.events import StepTimeModel
from router.pricing.fleet_speeds import LOOK_S, FleetSpeeds
from router.pricing.trial import AFTER_S
from tests.fakes.router import replica_id

A, B, C, D = map(replica_id, range(4))


def fit(times: float) -> StepTimeModel:
    return StepTimeModel(0.01 * times, 1e-4 * times, 0.0, 0.0)


class Speeds:
    """Four replicas that have measured themselves, at time 0."""

    def __init__(self, *times: float, machine: str = "") -> None:
        self.speeds = FleetSpeeds()
        for index in range(len(times)):
            self.speeds.add(replica_id(index), machine, 0.0)
        for index, each in enumerate(times):
            self.speeds.heard(replica_id(index), fit(each), is_idle=True, now=0.0)

    def times(self) -> list[float]:
        """What each is priced by, of `fit(1.0)`."""
        models = [self.speeds[name] for name in (A, B, C, D)]
        return [
            round(model.step_s(100, 0.0, 1) / fit(1.0).step_s(100, 0.0, 1), 3) for model in models if model
        ]

    def idle_until(self, name: str, times: float, end_s: float, begin_s: float = 0.0) -> None:
        now = begin_s
        while now <= end_s:
            self.speeds.heard(replica_id(int(name[1:])), fit(times), is_idle=True, now=now)
            now += 0.5


def test_equal_machines_are_priced_alike_and_a_slower_one_by_its_own_fit() -> None:
    assert Speeds(0.9, 1.1, 1.0, 1.5).times() == [1.0, 1.0, 1.0, 1.5]


def test_a_fit_that_moves_within_noise_moves_nobody_before_the_next_look() -> None:
    fleet = Speeds(1.0, 1.0, 1.0, 1.0)
    fleet.speeds.heard(A, fit(1.2), is_idle=True, now=0.5 * LOOK_S)
    assert fleet.times() == [1.0] * 4
    moved = fleet.speeds.heard(B, fit(1.0), is_idle=True, now=LOOK_S)
    assert sorted(moved) == [A, B, C, D]
    assert fleet.times() == [1.05] * 4


def test_a_machine_that_slows_down_is_priced_so_at_once_and_alone() -> None:
    fleet = Speeds(1.0, 1.0, 1.0, 1.0)
    assert fleet.speeds.heard(A, fit(10.0), is_idle=False, now=0.1) == [A]
    assert fleet.times() == [10.0, 1.0, 1.0, 1.0]
    fleet.speeds.heard(B, fit(1.0), is_idle=False, now=LOOK_S)
    assert fleet.times() == [10.0, 1.0, 1.0, 1.0]


def test_one_that_is_quick_again_is_one_of_them_at_the_next_look() -> None:
    fleet = Speeds(10.0, 1.0, 1.0, 1.0)
    fleet.speeds.heard(A, fit(1.2), is_idle=False, now=0.1)
    assert fleet.times()[0] == 1.2
    fleet.speeds.heard(B, fit(1.0), is_idle=False, now=LOOK_S)
    assert fleet.times() == [1.05] * 4


def test_who_has_no_fit_is_priced_as_the_median_is() -> None:
    fleet = Speeds(1.0, 1.02, 3.0)
    fleet.speeds.add(D, "", 0.0)
    assert fleet.times() == [1.01, 1.01, 3.0, 1.01]
    fleet.speeds.heard(D, fit(3.0), is_idle=True, now=0.0)
    assert fleet.times() == [1.01, 1.01, 3.0, 3.0]
    fleet.speeds.heard(D, None, is_idle=True, now=0.0)
    assert fleet.times() == [1.01, 1.01, 3.0, 1.01]


def test_fits_are_compared_on_what_requests_are_like() -> None:
    """Two fits that know short prompts, and guess what long ones cost, ten times apart."""
    fleet = FleetSpeeds()
    fits = {A: StepTimeModel(0.01, 1e-4, 0.0, 0.0), B: StepTimeModel(0.01, 1e-4, 1e-6, 0.0)}
    for name in fits:
        fleet.add(name, "", 0.0)
    for _ in range(64):
        fleet.sent(A, 50, 0)
    for name, model in fits.items():
        fleet.heard(name, model, is_idle=True, now=0.0)
    assert fleet[A] == fleet[B]
    for _ in range(300):
        fleet.sent(A, 8000, 0)
    fleet.heard(A, fits[B], is_idle=True, now=LOOK_S)
    fleet.heard(A, fits[A], is_idle=True, now=2 * LOOK_S)
    assert (fleet[A], fleet[B]) == (fits[A], fits[B])


def test_a_slow_one_without_work_is_tried_as_if_it_were_quick_with_one_request() -> None:
    fleet = Speeds(10.0, 1.0, 1.0, 1.0)
    fleet.idle_until(A, 10.0, AFTER_S - 0.5)
    assert fleet.times()[0] == 10.0
    fleet.idle_until(A, 10.0, AFTER_S, AFTER_S)
    assert fleet.times()[0] == 1.0
    assert fleet.speeds.sent(A, 500, 0)
    assert fleet.times()[0] == 10.0, "one request at a time"
    assert not fleet.speeds.sent(A, 500, 0)


def test_another_routers_request_is_the_trial_too() -> None:
    fleet = Speeds(10.0, 1.0, 1.0, 1.0)
    fleet.idle_until(A, 10.0, AFTER_S)
    assert fleet.speeds.heard(A, fit(10.0), is_idle=False, now=AFTER_S + 0.5) == [A]
    assert fleet.times()[0] == 10.0


def test_a_trial_brings_back_who_is_quick_and_puts_the_next_one_off_for_who_is_not() -> None:
    fleet = Speeds(10.0, 10.0, 1.0, 1.0)
    for name in (A, B):
        fleet.idle_until(name, 10.0, AFTER_S)
        fleet.speeds.sent(name, 500, 0)
    fleet.speeds.heard(A, fit(9.9), is_idle=False, now=AFTER_S + 1.0)
    fleet.speeds.heard(B, fit(1.1), is_idle=False, now=AFTER_S + 1.5)
    fleet.speeds.heard(B, fit(1.1), is_idle=False, now=AFTER_S + 2.5)
    assert fleet.times() == [pytest.approx(9.9), 1.033, 1.033, 1.033]
    begin_s = AFTER_S + 3.0
    fleet.idle_until(A, 9.9, begin_s + AFTER_S, begin_s)
    assert fleet.times()[0] == pytest.approx(9.9)
    fleet.idle_until(A, 9.9, begin_s + 2 * AFTER_S, begin_s + AFTER_S)
    assert fleet.times()[0] == 1.033


def test_where_most_are_slow_they_are_tried_too() -> None:
    """A machine stood still for a while: whoever measured itself first afterwards would get everything."""
    fleet = Speeds(10.0, 10.0, 10.0, 1.0)
    for name in (A, B, C):
        fleet.idle_until(name, 10.0, AFTER_S)
    assert fleet.times() == [1.0] * 4


def test_who_shares_a_machine_is_priced_as_its_fellows_are() -> None:
    fleet = Speeds(1.0, 1.4, 2.0, 3.6, machine="m")
    assert fleet.times() == [2.0] * 4
    assert fleet.speeds.heard(B, fit(5.0), is_idle=False, now=0.1) == []  # within what sharing explains
    assert fleet.speeds.heard(A, fit(20.0), is_idle=False, now=0.2) == [A]  # that is no neighbour's doing
    assert fleet.times() == [20.0, 2.0, 2.0, 2.0]


def test_who_is_left_alone_on_its_machine_is_priced_by_its_own_fit() -> None:
    fleet = Speeds(1.0, 2.0, machine="m")
    assert fleet.speeds[A] == fleet.speeds[B] == fit(1.5)
    fleet.speeds.remove(B, 0.5)
    assert fleet.speeds[A] == fit(1.0)
