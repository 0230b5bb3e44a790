"""What a router believes of a replica between two of its reports."""

from __future__ import annotations

import math

import pytest

from cache.events import StepTimeModel
from cache.types import RequestId
from router.pricing.fleet_load import FleetLoad
from router.pricing.load_view import LoadView
from router.pricing.replica_load import Reservation
from tests.fakes.router import STEP_TIME, FakeClock, info, load, replica_id

A, B = replica_id(0), replica_id(1)
X, Y = RequestId("x"), RequestId("y")


class Fleet:
    """Two replicas that have reported once, and the clock they live by."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.loads = FleetLoad(self.clock, reservation_ttl_s=600.0, silent_after_s=5.0)
        for replica in (A, B):
            self.loads.add_replica(replica, info())
            self.loads.report(replica, load())

    def view(self, replica: str = A) -> LoadView:
        return self.loads.view(replica_id(0) if replica == A else B)

    def book(self, request_id: RequestId, uncached: int = 500) -> Reservation:
        return Reservation(request_id, uncached, 0, math.ceil(uncached / 16), self.clock())


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


# 500 of a step's 512 tokens: their share of 0.01 s, 0.1 ms each, 0.001 s for the sequence.
SHARE_500_S = 0.01 * 500 / 512 + 0.05 + 0.001
PREFILL_500_S = pytest.approx(SHARE_500_S)


def test_a_reservation_is_backlog_until_the_engine_names_it(fleet: Fleet) -> None:
    fleet.loads.reserve(A, fleet.book(X))
    assert fleet.view().backlog_s == PREFILL_500_S
    assert fleet.view().num_requests == 1
    assert fleet.view(B).backlog_s == 0.0

    fleet.loads.report(A, load(admitted=(X,), num_running=1))
    assert fleet.view().backlog_s == 0.0
    assert fleet.view().num_requests == 1  # now by the engine's own count


def test_a_report_that_does_not_name_it_keeps_the_reservation(fleet: Fleet) -> None:
    fleet.loads.reserve(A, fleet.book(X))
    fleet.loads.report(A, load(admitted=(Y,), num_running=3, queued_uncached_tokens=1000, num_waiting=2))
    # The engine's queue of two prompts, and ours on top: 1500 tokens. A step has room for 509 of them beside
    # three running sequences, which take 0.1 ms + 1 ms each.
    steps_s = 1500 / 509 * (0.01 + 3 * 0.0011)
    assert fleet.view().backlog_s == pytest.approx(steps_s + 1500 * 0.0001 + 3 * 0.001)
    assert fleet.view().num_requests == 6
    assert fleet.view().num_waiting == 3


def test_the_last_chunk_of_a_long_prompt_is_priced_with_all_it_attends_to() -> None:
    """8 k tokens left of 128 k are a billion pairs: thirty times those of a prompt of 8 k."""
    loads = FleetLoad(FakeClock(), reservation_ttl_s=600.0, silent_after_s=5.0)
    loads.add_replica(A, info(max_batched_tokens=8192))
    model = StepTimeModel(0.0065, 32e-6, 1.4e-9, 0.6e-3)
    left, end = 8192, 131072
    pairs = left * (2 * end - left) // 2
    loads.report(A, load(queued_uncached_tokens=left, queued_attention=pairs, num_waiting=1, step_time=model))
    assert loads.view(A).backlog_s == pytest.approx(0.0065 + 8192 * 32e-6 + pairs * 1.4e-9 + 0.6e-3)
    assert loads.view(A).backlog_s > 5 * 8192 * 32e-6


def test_backlog_runs_down_between_reports_and_never_below_zero(fleet: Fleet) -> None:
    fleet.loads.reserve(A, fleet.book(X))
    fleet.clock.advance(0.021)
    assert fleet.view().backlog_s == pytest.approx(SHARE_500_S - 0.021)
    fleet.clock.advance(1.0)
    assert fleet.view().backlog_s == 0.0
    fleet.loads.reserve(A, fleet.book(Y))
    assert fleet.view().backlog_s == PREFILL_500_S  # idle time was not saved up


def test_small_prompts_share_a_step(fleet: Fleet) -> None:
    """Sixteen twins with one token each to compute are one step's work, not sixteen steps'."""
    for index in range(16):
        fleet.loads.reserve(A, fleet.book(RequestId(str(index)), uncached=1))
    assert fleet.view().backlog_s == pytest.approx(0.01 * 16 / 512 + 16 * 0.0001 + 16 * 0.001)


def test_a_long_prompt_is_a_sequence_in_each_of_its_steps(fleet: Fleet) -> None:
    fleet.loads.reserve(A, fleet.book(X, uncached=2048))  # four steps of 512
    assert fleet.view().backlog_s == pytest.approx(4 * 0.01 + 2048 * 0.0001 + 4 * 0.001)


def test_release_takes_an_unseen_reservation_back_and_may_be_repeated(fleet: Fleet) -> None:
    fleet.loads.reserve(A, fleet.book(X))
    fleet.loads.release(X)
    fleet.loads.release(X)
    assert fleet.view().backlog_s == 0.0
    assert fleet.view().num_requests == 0
    assert fleet.loads.num_in_flight == 0
    assert fleet.loads[A].num_in_flight == 0


def test_a_second_choice_for_a_request_replaces_the_first(fleet: Fleet) -> None:
    fleet.loads.reserve(A, fleet.book(X))
    fleet.loads.reserve(B, fleet.book(X))
    assert fleet.view(A).num_requests == 0
    assert fleet.view(B).num_requests == 1
    assert fleet.loads.num_in_flight == 1


def test_moving_takes_the_booking_along(fleet: Fleet) -> None:
    fleet.loads.reserve(A, fleet.book(X))
    fleet.loads.move(B, fleet.book(X))
    assert (fleet.view(A).num_requests, fleet.view(B).num_requests) == (0, 1)
    assert fleet.loads.placed(X) == B
    fleet.loads.release(X)
    assert (fleet.view(A).num_requests, fleet.view(B).num_requests) == (0, 0)


def test_the_engine_may_name_a_request_before_the_router_hears_who_took_it(fleet: Fleet) -> None:
    """Rank 2 accepted; its event overtakes the news of that. Booking it there again would count it twice."""
    fleet.loads.reserve(A, fleet.book(X))
    fleet.loads.report(B, load(admitted=(X,), num_running=1))
    assert fleet.view(A).num_requests == 0
    fleet.loads.move(B, fleet.book(X))
    assert fleet.view(B).num_requests == 1
    assert fleet.loads[B].num_in_flight == 1
    assert fleet.loads[A].num_in_flight == 0


def test_a_forgotten_reservation_is_dropped_after_its_time(fleet: Fleet) -> None:
    fleet.loads.reserve(A, fleet.book(X))
    fleet.clock.advance(599.0)
    assert fleet.loads.expire() == 0
    fleet.clock.advance(2.0)
    assert fleet.loads.expire() == 1
    fleet.loads.report(A, load())
    assert fleet.view().num_requests == 0


def test_requests_of_a_replica_that_left_can_still_be_released(fleet: Fleet) -> None:
    fleet.loads.reserve(A, fleet.book(X))
    fleet.loads.remove_replica(A)
    fleet.loads.add_replica(A, info())
    fleet.loads.release(X)
    assert fleet.loads.num_in_flight == 0
    assert fleet.loads[A].num_in_flight == 0


def test_a_silent_replica_is_judged_by_what_this_router_has_there(fleet: Fleet) -> None:
    fleet.loads.report(A, load(num_running=40, num_waiting=300))
    assert fleet.view().is_full
    fleet.loads.reserve(A, fleet.book(X))
    fleet.clock.advance(5.1)
    assert fleet.view().is_silent
    assert fleet.view().num_requests == 1
    assert not fleet.view().is_full
    fleet.loads.report(A, load())
    assert not fleet.view().is_silent


@pytest.mark.parametrize(
    ("running", "waiting", "is_full"), [(64, 255, False), (64, 256, True), (2, 256, True), (0, 0, False)]
)
def test_full_is_where_the_engine_would_refuse(
    fleet: Fleet, running: int, waiting: int, is_full: bool
) -> None:
    fleet.loads.report(A, load(num_running=running, num_waiting=waiting))
    assert fleet.view().is_full is is_full


def test_own_requests_on_the_way_count_towards_full() -> None:
    clock = FakeClock()
    loads = FleetLoad(clock, reservation_ttl_s=600.0, silent_after_s=5.0)
    loads.add_replica(A, info(max_running=1, max_waiting=1))
    for name in ("1", "2"):
        assert not loads.view(A).is_full
        loads.reserve(A, Reservation(RequestId(name), 10, 0, 1, clock()))
    assert loads.view(A).is_full


def test_used_blocks_include_what_is_on_the_way(fleet: Fleet) -> None:
    fleet.loads.report(A, load(total_blocks=100, free_blocks=60))
    fleet.loads.reserve(A, fleet.book(X, uncached=160))
    assert fleet.view().used_fraction == pytest.approx(0.5)


def test_free_blocks_that_answers_grow_into_are_no_room_for_a_newcomer(fleet: Fleet) -> None:
    """Four hold or will hold 80 of 100 blocks, 20 each: one more fits, the next waits until one has ended."""
    fleet.loads.residence.observe(8.0)
    running = {"num_running": 4, "total_blocks": 100, "free_blocks": 60}
    fleet.loads.report(A, load(**running, growth_blocks=40))
    assert fleet.view().backlog_s == 0.0
    fleet.loads.report(A, load(**running, growth_blocks=45))
    assert fleet.view().backlog_s == pytest.approx(8.0 / 4)


def test_who_is_slow_has_a_place_the_later() -> None:
    """Sequences stay for 2 s on average; where a step takes ten times as long they stay for 20."""
    loads = FleetLoad(FakeClock(), reservation_ttl_s=600.0, silent_after_s=5.0)
    for name in (A, B, replica_id(2)):
        loads.add_replica(name, info(max_running=1))
        loads.report(name, load())
    loads.residence.observe(2.0)
    slow = StepTimeModel(0.1, 0.001, 0.0, 0.01)
    loads.report(A, load(num_running=1, context_tokens=99, step_time=slow))
    loads.report(B, load(num_running=1, context_tokens=99, step_time=StepTimeModel(0.01, 0.0001, 0.0, 0.001)))
    assert loads.view(B).backlog_s == pytest.approx(2.0)
    assert loads.view(A).backlog_s == pytest.approx(20.0)


@pytest.mark.parametrize(
    "model",
    [
        StepTimeModel(-0.1, 1e-4, 0.0, 0.0),
        StepTimeModel(math.nan, 1e-4, 0.0, 0.0),
        StepTimeModel(0.01, 1e308, 0.0, 0.0),
        StepTimeModel(0, 0, 0, 0),
    ],
)
def test_a_fit_that_prices_work_below_zero_at_nothing_or_without_end_is_no_fit(
    fleet: Fleet, model: StepTimeModel
) -> None:
    fleet.loads.report(B, load(step_time=None))
    fleet.loads.report(A, load(step_time=model, queued_uncached_tokens=1000))
    assert fleet.view().step_time is None
    assert fleet.view().backlog_s == 0.0


def test_a_replica_without_a_fit_is_taken_to_be_like_the_median_of_the_others(fleet: Fleet) -> None:
    """One replica that never fits, new or broken, must not keep the whole fleet's cost in tokens."""
    slower = StepTimeModel(0.03, 0.0003, 0.0, 0.003)
    fleet.loads.report(B, load(step_time=slower))
    fleet.loads.add_replica(replica_id(2), info())
    assert fleet.loads.view(replica_id(2)).step_time == STEP_TIME  # of two, the faster
    fleet.loads.reserve(replica_id(2), fleet.book(X, uncached=512))
    assert fleet.loads.view(replica_id(2)).backlog_s == pytest.approx(0.01 + 512 * 0.0001 + 0.001)
    own = StepTimeModel(0.5, 0.0, 0.0, 0.0)
    fleet.loads.report(replica_id(2), load(step_time=own))
    assert fleet.loads.view(replica_id(2)).step_time == own


def test_another_speed_is_that_of_what_is_left_to_do(fleet: Fleet) -> None:
    """Others' fits may change a replica's price between its reports: what it has done since stays done."""
    fleet.loads.report(A, load(queued_uncached_tokens=1000, num_waiting=1))
    whole_s = fleet.view().backlog_s
    fleet.clock.advance(0.25 * whole_s)
    fleet.loads[A].price_by(StepTimeModel(0.02, 0.0002, 0.0, 0.002), fleet.clock())
    assert fleet.view().backlog_s == pytest.approx(2 * 0.75 * whole_s)


def test_what_was_booked_is_priced_when_a_speed_can_be_assumed() -> None:
    clock = FakeClock()
    loads = FleetLoad(clock, reservation_ttl_s=600.0, silent_after_s=5.0)
    loads.add_replica(A, info())
    loads.add_replica(B, info())
    loads.reserve(A, Reservation(X, 500, 0, 32, clock()))
    assert loads.view(A).backlog_s == 0.0
    loads.report(B, load())
    assert loads.view(A).backlog_s == PREFILL_500_S


def test_a_few_early_fits_do_not_speak_for_a_fleet_that_is_still_starting() -> None:
    loads = FleetLoad(FakeClock(), reservation_ttl_s=600.0, silent_after_s=5.0)
    for index in range(5):
        loads.add_replica(replica_id(index), info())
    for index, is_known in enumerate([False, False, True]):
        loads.report(replica_id(index), load())
        assert (loads.view(replica_id(4)).step_time is not None) is is_known
    loads.add_replica(replica_id(5), info())
    assert loads.view(replica_id(5)).step_time == STEP_TIME
    loads.add_replica(replica_id(6), info())
    assert loads.view(replica_id(5)).step_time is None
    for index in (3, 4, 5, 6):
        loads.remove_replica(replica_id(index))
    loads.report(A, load(step_time=None))
    assert loads.view(A).step_time == STEP_TIME


def test_a_first_fit_prices_what_was_booked_before_it() -> None:
    clock = FakeClock()
    loads = FleetLoad(clock, reservation_ttl_s=600.0, silent_after_s=5.0)
    loads.add_replica(A, info())
    loads.reserve(A, Reservation(X, 500, 0, 32, clock()))
    assert loads.view(A).backlog_s == 0.0
    loads.report(A, load(step_time=STEP_TIME))
    assert loads.view(A).backlog_s == PREFILL_500_S
    loads.release(X)
    assert loads.view(A).backlog_s == 0.0


# --- when steps end -------------------------------------------------------------------------------

WAY_S = 0.004
DECODES_S = 0.01 + 2 * (0.0001 + 0.001)  # a step of two sequences that decode


def stepping(fleet: Fleet) -> None:
    """A computes a step after the other for two sequences, and says so; a way there and back was measured."""
    fleet.loads.report(A, load(num_running=2), is_between_steps=True)
    fleet.loads.reserve(A, fleet.book(X, uncached=1))
    fleet.clock.advance(WAY_S)
    fleet.loads.report(A, load(num_running=2, num_waiting=1, queued_uncached_tokens=1, admitted=(X,)))
    fleet.loads.release(X)
    fleet.clock.advance(1.0)
    fleet.loads.report(A, load(num_running=2), is_between_steps=True)


def test_what_is_left_of_a_step_follows_from_when_it_began(fleet: Fleet) -> None:
    assert fleet.view().step_left_s is None
    stepping(fleet)
    assert fleet.view().step_left_s == pytest.approx(DECODES_S - WAY_S)
    fleet.clock.advance(0.005)
    assert fleet.view().step_left_s == pytest.approx(DECODES_S - WAY_S - 0.005)
    fleet.clock.advance(3 * DECODES_S)
    assert fleet.view().step_left_s == pytest.approx(DECODES_S - WAY_S - 0.005)


def test_a_step_with_prompts_in_it_takes_as_many_tokens_as_there_is_room_for(fleet: Fleet) -> None:
    stepping(fleet)
    queued = load(num_running=2, num_waiting=2, queued_uncached_tokens=1020)
    fleet.loads.report(A, queued, is_between_steps=True)
    # Half of the two prompts, of which one is begun.
    assert fleet.view().step_left_s == pytest.approx(DECODES_S + 510 * 0.0001 + 0.001 - WAY_S)


def test_an_update_inside_a_step_tells_of_no_boundary(fleet: Fleet) -> None:
    stepping(fleet)
    fleet.clock.advance(0.005)
    fleet.loads.report(A, load(num_running=2, num_waiting=1, queued_uncached_tokens=1))
    assert fleet.view().step_left_s == pytest.approx(DECODES_S - WAY_S - 0.005)


def test_who_rests_has_no_step_in_progress(fleet: Fleet) -> None:
    stepping(fleet)
    fleet.loads.report(A, load(), is_between_steps=True)
    assert fleet.view().step_left_s is None
