"""What a decision books: where it follows the request to, and when it ends."""

from __future__ import annotations

import pytest

from cache.events import RequestEnded, StepTimeModel
from cache.types import ReplicaId, RequestId
from router.placement.observer import SilentObserver
from router.policies import PolicyRequest
from router.pricing.trial import AFTER_S
from tests.fakes.router import chain, load, query, replica_id
from tests.fakes.routing import RoutingBench

A, B, C = replica_id(0), replica_id(1), replica_id(2)


def test_in_flight_returns_to_zero(bench: RoutingBench) -> None:
    placement = bench.routing.choose(query("q"))
    assert bench.in_flight(placement.replica_id) == 1
    bench.routing.release(placement.request_id)
    bench.routing.release(placement.request_id)
    assert bench.routing.statistics().in_flight == 0
    assert bench.in_flight(placement.replica_id) == 0


def test_the_booking_follows_who_accepted(bench: RoutingBench) -> None:
    placement = bench.routing.choose(query("q"))
    first, second = placement.ranks
    bench.routing.routed(placement.request_id, first)
    assert (bench.in_flight(first), bench.in_flight(second)) == (1, 0)
    bench.routing.routed(placement.request_id, second)
    assert (bench.in_flight(first), bench.in_flight(second)) == (0, 1)
    # Its prefix is there now: the next twin follows it.
    bench.routing.first_token(placement.request_id, second, 0)
    bench.routing.release(placement.request_id)
    twin = bench.routing.choose(query("q")._replace(request_id=RequestId("twin")))
    assert (twin.replica_id, twin.overlap_blocks) == (second, 8)
    bench.routing.routed(RequestId("never chosen"), A)
    assert bench.routing.statistics().in_flight == 1


def test_a_retry_replaces_the_first_booking(bench: RoutingBench) -> None:
    first = bench.routing.choose(query("q"))
    again = bench.routing.choose(query("q", excluded=frozenset({first.replica_id})))
    assert again.replica_id != first.replica_id
    assert bench.in_flight(first.replica_id) == 0
    assert bench.routing.statistics().in_flight == 1


def test_what_an_engine_has_ended_is_no_work_of_it_however_long_it_is_read() -> None:
    """A client that did not read kept its replica busy for its Router, and long residence with it."""
    bench = RoutingBench(1)
    bench.routing.choose(query("q"))
    bench.routing.routed(RequestId("q"), A)
    bench.routing.first_token(RequestId("q"), A, 0)
    bench.clock.advance(2.0)
    bench.say(A, ended=(RequestEnded(RequestId("q"), 0, 9),))
    assert (bench.in_flight(A), bench.routing.statistics().in_flight) == (0, 1)
    bench.routing.routed(RequestId("q"), A)  # was told late
    assert bench.in_flight(A) == 0
    bench.clock.advance(3600.0)
    bench.routing.release(RequestId("q"))
    assert bench.routing.statistics().in_flight == 0
    assert bench.routing._loads.residence.mean_s == 2.0


def test_what_ends_at_a_replica_that_has_left_is_told() -> None:
    bench, heard = RoutingBench(2), list[RequestEnded]()
    bench.routing.watch_ends(heard.append)
    bench.routing.choose(query("q", excluded=frozenset({B})))
    bench.routing.routed(RequestId("q"), A)
    bench.routing.update_replicas({B: bench.infos[B]})
    ended = RequestEnded(RequestId("q"), 0, 500)
    bench.say(A, ended=(ended,))
    assert heard == [ended]


def test_a_last_word_between_two_steps_is_told_too() -> None:
    bench, heard = RoutingBench(1), list[RequestEnded]()
    bench.routing.watch_ends(heard.append)
    ended = RequestEnded(RequestId("q"), 0, 500)
    bench.routing.on_load(A, load(ended=(ended,)))
    bench.routing.update_replicas({})
    bench.routing.on_load(A, load(ended=(ended,)))
    assert heard == [ended, ended]


class Moves(SilentObserver):
    """Where requests were said to be instead of where they were booked."""

    def __init__(self) -> None:
        self.told: list[ReplicaId] = []

    def moved(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        self.told.append(replica_id)


def test_who_took_what_has_ended_is_no_move() -> None:
    bench, moves = RoutingBench(1), Moves()
    bench.routing.watch(moves)
    bench.routing.choose(query("q"))
    bench.say(A, ended=(RequestEnded(RequestId("q"), 0, 9),))
    bench.routing.routed(RequestId("q"), A)
    assert moves.told == []


def test_an_end_that_overtakes_who_took_it_was_when_it_was_heard() -> None:
    bench = RoutingBench(2)
    second = bench.routing.choose(query("q")).ranks[1]
    bench.routing.first_token(RequestId("q"), second, 0)
    bench.clock.advance(2.0)
    bench.say(second, ended=(RequestEnded(RequestId("q"), 0, 9),))
    bench.clock.advance(1.0)
    bench.routing.routed(RequestId("q"), second)
    bench.routing.release(RequestId("q"))
    assert bench.routing._loads.residence.mean_s == 2.0


@pytest.mark.parametrize(("num_tokens", "has_passed"), [(0, False), (1, True)])
def test_what_has_ended_went_before_an_earlier_prompt_if_it_has_tokens(
    num_tokens: int, has_passed: bool
) -> None:
    """Its first token may be on its way still; who was refused or cancelled has taken none of that time."""
    bench = RoutingBench(1)
    bench.say(A, step_time=StepTimeModel(0.01, per_token_s=0.001, per_attention_s=0.0, per_sequence_s=0.0))
    bench.routing.choose(query("earlier"))
    waiting = bench.routing._late._lateness._sent[RequestId("earlier")]
    expected_s = waiting.expected_s
    bench.routing.choose(query("later"))
    bench.say(A, ended=(RequestEnded(RequestId("later"), 0, num_tokens),))
    assert (waiting.expected_s > expected_s) == has_passed


def test_an_end_that_overtakes_who_took_it_ends_the_booking_there() -> None:
    """It was dropped where not the first of the ranks had it: that stayed busy for as long as it was read."""
    bench = RoutingBench(2)
    placement = bench.routing.choose(query("q"))
    first, second = placement.ranks
    bench.say(second, admitted=(RequestId("q"),), ended=(RequestEnded(RequestId("q"), 0, 9),))
    assert bench.in_flight(first) == 1  # it is not told yet that `second` took it: `first` may have
    bench.clock.advance(1.0)
    bench.routing.routed(RequestId("q"), second)
    assert (bench.in_flight(first), bench.in_flight(second)) == (0, 0)
    bench.routing.release(RequestId("q"))


def test_an_end_where_nobody_took_it_is_none() -> None:
    bench = RoutingBench(2)
    placement = bench.routing.choose(query("q"))
    first, second = placement.ranks
    bench.say(second, ended=(RequestEnded(RequestId("q"), 0, 9),))
    bench.routing.routed(RequestId("q"), first)
    assert (bench.in_flight(first), bench.in_flight(second)) == (1, 0)
    bench.routing.routed(RequestId("q"), second)
    assert (bench.in_flight(first), bench.in_flight(second)) == (0, 1)


def test_an_end_that_overtakes_the_answer_is_one_after_no_time() -> None:
    bench = RoutingBench(1)
    bench.routing._loads.residence.observe(1.0)
    bench.routing.choose(query("q"))
    bench.say(A, ended=(RequestEnded(RequestId("q"), 0, 9),))
    bench.clock.advance(1.0)
    bench.routing.first_token(RequestId("q"), A, 0)
    bench.clock.advance(1.0)
    bench.routing.release(RequestId("q"))
    assert bench.routing._loads.residence.mean_s == 0.5


@pytest.mark.parametrize(
    ("replica", "ended"),
    [
        (A, RequestEnded(RequestId("q"), 0, 9)),  # the attempt before
        (B, RequestEnded(RequestId("q"), 1, 9)),  # where it is not
        (A, RequestEnded(RequestId("another router's"), 1, 9)),
    ],
)
def test_no_other_end_ends_a_booking(replica: ReplicaId, ended: RequestEnded) -> None:
    bench = RoutingBench(2)
    bench.routing.choose(query("q", excluded=frozenset({B})))
    bench.routing.choose(query("q", excluded=frozenset({B}), attempt=1))
    bench.say(replica, ended=(ended,))
    assert bench.in_flight(A) == 1


def test_a_slow_replica_with_an_answer_that_nobody_reads_is_tried_again() -> None:
    """It was not idle for as long as the stream was there, and so stayed slow for ever."""
    bench = RoutingBench(2)
    slow = StepTimeModel(base_s=0.5, per_token_s=0.005, per_attention_s=0.0, per_sequence_s=0.05)
    bench.say(A, step_time=slow)
    bench.routing.choose(query("q", excluded=frozenset({B})))
    bench.say(A, step_time=slow, ended=(RequestEnded(RequestId("q"), 0, 9),))
    bench.clock.advance(AFTER_S)
    bench.say(A, step_time=slow)
    bench.say(B, queued_uncached_tokens=1000, num_waiting=2)
    assert bench.routing.choose(query("r")).replica_id == A


def test_a_request_survives_the_loss_of_its_replica(bench: RoutingBench) -> None:
    placement = bench.routing.choose(query("q"))
    bench.routing.replica_lost(placement.replica_id)
    [other] = bench.routing.rerank(placement.request_id, [placement.ranks[1]])
    bench.routing.routed(placement.request_id, other)
    assert bench.in_flight(other) == 1
    bench.routing.release(placement.request_id)
    assert bench.in_flight(other) == 0


def test_rerank_orders_what_is_left_without_booking_again() -> None:
    bench = RoutingBench(3)
    bench.say(C, stored=chain("q", 8))
    bench.routing.choose(query("q", excluded=frozenset({B})))
    assert bench.routing.rerank(RequestId("q"), [A, B, C]) == [C, A]
    bench.say(C, num_waiting=256)
    stranger = replica_id(50)
    assert bench.routing.rerank(RequestId("q"), [stranger, C, A]) == [A, C, stranger]
    assert bench.routing.statistics().in_flight == 1


def test_rerank_orders_calls_that_were_never_chosen_for() -> None:
    """Serve also routes calls that are no generations, such as the one made at start."""
    bench = RoutingBench(2)
    assert sorted(bench.routing.rerank(RequestId("describe"), [A, B])) == [A, B]
    assert bench.routing.rerank(RequestId("describe"), []) == []
    assert bench.routing.statistics().in_flight == 0


def test_reservations_nobody_released_are_counted(bench: RoutingBench) -> None:
    bench.routing.choose(query("q"))
    bench.clock.advance(601.0)
    bench.routing.choose(query("r"))
    assert bench.routing.statistics().expired_reservations == 1


def test_the_engine_naming_a_request_ends_its_reservation(bench: RoutingBench) -> None:
    placement = bench.routing.choose(query("q"))
    bench.say(placement.replica_id, admitted=(placement.request_id,), num_running=1)
    replica = next(r for r in bench.routing.statistics().replicas if r.replica_id == placement.replica_id)
    assert (replica.unseen, replica.in_flight, replica.num_running) == (0, 1, 1)


def test_who_accepted_is_known_even_after_it_died(bench: RoutingBench) -> None:
    placement = bench.routing.choose(query("q"))
    assert bench.routing.accepted_by(placement.request_id) is None
    bench.routing.routed(placement.request_id, placement.ranks[1])
    bench.routing.replica_lost(placement.ranks[1])
    assert bench.routing.accepted_by(placement.request_id) == placement.ranks[1]
    bench.routing.release(placement.request_id)
    assert bench.routing.accepted_by(placement.request_id) is None


def test_two_routers_agree_through_the_engine_alone() -> None:
    """Each adds only what the engine has not seen: after its word both know the same load."""
    one, two = RoutingBench(1), RoutingBench(1)
    ours, theirs = one.routing.choose(query("ours")), two.routing.choose(query("theirs"))
    for bench in (one, two):
        bench.say(A, admitted=(ours.request_id, theirs.request_id), num_running=2)
    views = [bench.routing.statistics().replicas[0] for bench in (one, two)]
    assert [(view.unseen, view.num_running, view.backlog_s) for view in views] == [(0, 2, 0.0)] * 2
