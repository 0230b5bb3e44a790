"""A replica that stops answering: what it said of itself must not make it look idle."""

from __future__ import annotations

import pytest

from cache.types import ReplicaId, RequestId
from router.placement.late_replicas import READING_S
from router.placement.routing import RouteQuery
from router.pricing.lateness import LATE_S
from tests.fakes.router import chain, query, replica_id
from tests.fakes.routing import RoutingBench

A, B, C = replica_id(0), replica_id(1), replica_id(2)


def answer(bench: RoutingBench, asked: RouteQuery) -> None:
    """As a healthy replica does: at once."""
    bench.routing.first_token(asked.request_id, A, 0)
    bench.routing.finish(asked.request_id)


def say(bench: RoutingBench, *names: ReplicaId, admitted: tuple[str, ...] = ()) -> None:
    """The first of them has these; and the Router has the time to read it."""
    for name in names:
        bench.say(name, admitted=admitted if name == names[0] else ())
    bench.clock.advance(READING_S)


def four_seconds_ago() -> tuple[RoutingBench, RouteQuery]:
    """A prompt was sent to A, which holds it, and nobody has said anything since."""
    bench, asked = RoutingBench(2), query("q", 200)
    bench.say(A, stored=chain("q", 200))
    assert bench.routing.choose(asked).replica_id == A
    bench.clock.advance(4.0)
    return bench, asked


def test_a_hung_replica_gets_no_more_than_what_came_before_anybody_could_know() -> None:
    """It said last that it is idle, and has answered nothing since. The others answer at once."""
    bench = RoutingBench(3)
    sent_to_hung: list[float] = []
    for step in range(400):
        asked = query(f"q{step}")
        where = bench.routing.choose(asked).replica_id
        bench.routing.routed(asked.request_id, where)
        if where == A:
            sent_to_hung.append(step * 0.05)
        else:
            answer(bench, asked)
        for other in (B, C):
            bench.say(other)
        bench.clock.advance(0.05)
    assert sent_to_hung, "nobody knew at first"
    assert max(sent_to_hung) < LATE_S + 0.3
    assert len(sent_to_hung) <= 5


def test_affinity_yields_too() -> None:
    bench, _ = four_seconds_ago()
    say(bench, B)
    twin = query("q", 200, request_id="twin")
    assert bench.routing.choose(twin).replica_id == B


@pytest.mark.parametrize("first_read", ["a request", "a report"])
def test_a_router_that_stood_still_calls_nobody_late_before_it_has_read_everything(first_read: str) -> None:
    """Twins one after another: their replica answers while the Router's process stands still."""
    bench, asked = four_seconds_ago()
    if first_read == "a request":
        assert bench.routing.choose(query("q", 200, request_id="read first")).replica_id == A
    bench.say(B)  # what was there to be read
    assert bench.routing.choose(query("q", 200, request_id="read next")).replica_id == A
    bench.clock.advance(READING_S / 2)
    bench.routing.first_token(asked.request_id, A, 0)
    assert bench.routing.choose(query("q", 200, request_id="read last")).replica_id == A


@pytest.mark.parametrize("num_said", [6, 7, 8])
def test_who_speaks_all_the_time_does_not_keep_the_others_from_being_late(num_said: int) -> None:
    """Wherever the decision falls in the time that it takes to read."""
    bench, _ = four_seconds_ago()
    for _ in range(num_said):
        bench.say(B)
        bench.clock.advance(READING_S / 4)
    assert bench.routing.choose(query("q", 200, request_id="twin")).replica_id == B


def test_it_is_as_good_as_before_once_it_answers() -> None:
    bench, asked = four_seconds_ago()
    say(bench, A, B)
    assert bench.routing.choose(query("q", 200, request_id="twin")).replica_id == B
    bench.routing.finish("twin")  # type: ignore[arg-type]
    bench.routing.first_token(asked.request_id, A, 0)
    assert bench.routing.choose(query("q", 200, request_id="third")).replica_id == A


def test_one_that_is_late_again_and_again_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    bench = RoutingBench(2)
    with caplog.at_level("INFO", logger="router.placement.late_replicas"):
        for number, told in enumerate((1, 1, 2)):  # 5 s between two times that it is late
            asked = query(f"q{number}", 1, excluded=frozenset({B}))
            bench.routing.choose(asked)
            bench.clock.advance(4.0)
            say(bench, A, B, admitted=(asked.request_id,))
            assert bench.routing.choose(query(f"other{number}", 1)).replica_id == B
            bench.routing.finish(RequestId(f"other{number}"))
            bench.routing.first_token(asked.request_id, A, 0)
            bench.routing.finish(asked.request_id)
            bench.clock.advance(1.0 - READING_S)
            assert [record.message.split(",")[0] for record in caplog.records] == ["replica is late"] * told


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_fleet_that_is_late_as_a_whole_is_used_on(num_replicas: int) -> None:
    """Estimates were wrong: nobody is held back, nothing is refused."""
    bench = RoutingBench(num_replicas)
    for index in range(num_replicas):
        bench.routing.choose(query(f"first{index}"))
    bench.clock.advance(60.0)
    placement = bench.routing.choose(query("later"))
    assert len(placement.ranks) == num_replicas
    num_open, free = bench.routing.free_replicas(0.1)
    assert num_open == num_replicas
    assert free


def test_a_stream_continued_elsewhere_is_no_late_first_token() -> None:
    bench = RoutingBench(2)
    asked = query("q")
    where = bench.routing.choose(asked).replica_id
    bench.routing.continued(asked.request_id)
    bench.clock.advance(10.0)
    say(bench, A, B)
    _, free = bench.routing.free_replicas(0.1)
    assert where in {state.replica_id for state in free}


def assert_avoided_while_hung(bench: RoutingBench, all_but_a: frozenset[ReplicaId]) -> None:
    """A takes a request and computes nothing: whatever comes then goes to B."""
    bench.routing.choose(query("hung", 1, excluded=all_but_a))
    bench.clock.advance(5.0)
    say(bench, A, B, admitted=("hung",))
    for number in range(4):
        asked = query(f"q{number}", 1)
        assert bench.routing.choose(asked).replica_id == B
        bench.routing.finish(asked.request_id)


def test_a_hung_replica_is_late_although_one_that_left_owes_first_tokens_too() -> None:
    """What that one still computes says nothing of those that are left: one of two is late, and not all."""
    bench = RoutingBench(3)
    only = {name: frozenset(bench.infos) - {name} for name in bench.infos}
    bench.routing.choose(query("left", 1, excluded=only[C]))
    bench.routing.update_replicas({name: bench.infos[name] for name in (A, B)})
    assert_avoided_while_hung(bench, only[A])


def test_nor_although_one_that_is_no_member_has_accepted_a_request() -> None:
    """Serve may ask a replica that was lost until its own list has let go of it."""
    bench = RoutingBench(3)
    only = {name: frozenset(bench.infos) - {name} for name in bench.infos}
    bench.routing.replica_lost(C)
    left = query("left", 1, excluded=only[B])
    bench.routing.choose(left)
    bench.routing.routed(left.request_id, C)
    assert_avoided_while_hung(bench, only[A])
