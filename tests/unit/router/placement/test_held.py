"""Requests that wait at the router: who leaves when, and for which replica."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from cache.errors import ConfigError, DeadlineExceeded
from cache.events import StepTimeModel
from cache.types import ReplicaId, RequestId
from router.errors import NoReplica
from router.placement.decision import RouteQuery
from router.placement.held import SUCCESSION_S, HeldRequests
from router.placement.held_request import Departure
from router.placement.routing import Routing
from tests.fakes.held import OPTIONS, A, B, HoldingRouter
from tests.fakes.router import FakeClock, config, info, load, query


@pytest.fixture
def router() -> HoldingRouter:
    return HoldingRouter()


def slower(times: float) -> StepTimeModel:
    """Than the paper replicas."""
    fast = load().step_time
    assert fast is not None
    return StepTimeModel(*(times * each for each in msgspec.structs.astuple(fast)))


def test_an_idle_replica_gets_a_request_at_once(router: HoldingRouter) -> None:
    router.submit("q")
    [departure] = router.held.poll()
    assert departure == Departure(RequestId("q"), 0.0, departure.placement)
    assert departure.placement is not None
    assert departure.placement.replica_id == A
    assert router.routing.statistics().in_flight == 1
    assert len(router.held) == 0
    assert router.held.next_poll_at() is None


def test_a_request_waits_until_its_replica_has_nearly_caught_up(router: HoldingRouter) -> None:
    router.report(A, backlog_s=0.5)
    router.submit("q")
    assert router.poll() == []
    assert router.routing.statistics().in_flight == 0  # bound to nothing
    waited = 0.0
    while not router.poll():
        wake_at = router.held.next_poll_at()
        assert wake_at is not None
        waited += wake_at - router.clock()
        router.clock.now = wake_at
    assert waited == pytest.approx(0.5 + 0.001 - 0.1, abs=0.002)


@pytest.mark.parametrize(
    ("num_running", "max_backlog_s", "leaves"), [(60, 0.03, True), (0, 0.03, False), (60, 0.0, False)]
)
def test_a_long_step_finds_more_than_a_short_backlog(
    num_running: int, max_backlog_s: float, leaves: bool
) -> None:
    """Whatever prompts are in a step, what decodes makes it long; and 0 wants a replica idle all the same."""
    router = HoldingRouter(options=replace(OPTIONS, max_backlog_s=max_backlog_s))
    router.report(A, 0.03, num_running=num_running)
    _, [state] = router.routing.free_replicas(1.0)
    assert state.decode_step_s == (pytest.approx(0.076) if num_running else 0.0)
    router.submit("q")
    assert router.poll() == ["q"] * leaves


def test_a_slower_replica_is_not_left_idle_while_others_wait() -> None:
    """Half as slow again, empty, and a crowd of cold prompts: what computing them costs the fleet is no
    reason to wait for the faster one, however long the queue."""
    router = HoldingRouter(num_replicas=2)
    fast = load().step_time
    assert fast is not None
    slow = StepTimeModel(*(1.5 * each for each in msgspec.structs.astuple(fast)))
    router.report(B, step_time=slow)
    for number in range(8):
        router.submit(str(number), 45)
    placed = {d.placement.replica_id for d in router.held.poll() if d.placement is not None}
    assert placed == {A, B}


def test_who_waits_before_it_for_the_same_replica_is_work_before_it() -> None:
    """Worked by hand: prompts of 0.78 s, 2.58 s at B. The first goes to A. The second and the third
    wait for A, which would answer them after 1.56 and 2.34 s. The fourth would wait for those, too, and be
    answered after 3.11 s: it is sent to B. The fifth finds B busy, and waits for A again."""
    router = HoldingRouter(num_replicas=2)
    router.report(B, step_time=slower(3.3))
    for number in range(5):
        router.submit(str(number), 400)
    left = {d.request_id: d.placement.replica_id for d in router.held.poll() if d.placement is not None}
    assert left == {"0": A, "3": B}
    assert router.poll() == []


def test_who_waited_before_it_and_left_is_work_before_it_no_more() -> None:
    router = HoldingRouter(num_replicas=1)
    router.report(A, backlog_s=1.0)
    router.submit("first", 100)
    router.submit("second", 100)
    assert router.poll() == []
    router.held.withdraw(RequestId("first"))
    router.report(A, backlog_s=0.0)
    assert router.poll() == ["second"]


def test_it_leaves_for_whoever_is_best_by_then() -> None:
    """At once it would have been sent to the holder, whose queue turned out longer than it looked."""
    router = HoldingRouter(2)
    router.routing.update_replicas(router.infos)
    router.report(A, backlog_s=0.5)
    router.report(B, backlog_s=0.6)
    router.submit("q")
    assert router.poll() == []
    router.report(A, backlog_s=2.0)
    router.report(B, backlog_s=0.05)
    [departure] = router.held.poll()
    assert departure.placement is not None
    assert departure.placement.replica_id == B


def test_a_free_replica_is_not_taken_when_the_holder_is_worth_waiting_for() -> None:
    router = HoldingRouter(2)
    placement = router.routing.choose(query("long", 200))  # predicted there
    router.routing.first_token(placement.request_id, placement.replica_id, 0)
    router.routing.release(placement.request_id)
    holder, other = placement.replica_id, placement.ranks[1]
    router.routing.choose(query("long", 200, request_id=RequestId("twin")))
    router.report(holder, backlog_s=0.2, num_running=1, admitted=(RequestId("twin"),))
    router.report(other)
    router.held.submit(query("long", 200, request_id=RequestId("again")))
    assert router.poll() == []
    router.report(holder, backlog_s=0.05)
    [departure] = router.held.poll()
    assert departure.placement is not None
    assert (departure.placement.replica_id, departure.placement.overlap_blocks) == (holder, 200)


def test_a_request_waits_here_while_all_places_are_taken() -> None:
    """Nothing is queued, so it would be sent; but 64 sequences of 32 s each end one every 0.5 s."""
    router = HoldingRouter(2, options=replace(OPTIONS, max_backlog_s=0.05))
    first = router.routing.choose(query("first"))
    router.routing.first_token(first.request_id, first.replica_id, 0)
    router.clock.advance(32.0)
    router.routing.release(first.request_id)
    router.report(A, num_running=64)
    router.report(B, num_running=64)
    router.submit("q", 300)
    assert router.poll() == []
    router.report(B, num_running=63)
    [departure] = router.held.poll()
    assert departure.placement is not None
    assert departure.placement.replica_id == B
    router.submit("r", 300)  # the place is booked, though its engine has not said so
    assert router.poll() == []


def test_full_replicas_are_waited_for(router: HoldingRouter) -> None:
    """Sent at once it would be refused with AllBusy; here it may wait until somebody has room."""
    router.report(A, num_waiting=256)
    router.submit("q")
    assert router.poll() == []
    assert RequestId("q") in router.held
    router.report(A)
    assert router.poll() == ["q"]


def test_nobody_waits_for_ever_for_a_word_of_a_replica_that_was_full_when_it_fell_silent(
    router: HoldingRouter,
) -> None:
    its = router.infos[A]
    router.report(A, num_running=its.max_running, num_waiting=its.max_waiting)
    router.submit("before")
    assert router.poll() == []
    router.clock.advance(config().silent_after_s)
    assert router.poll() == []
    router.clock.advance(0.1)
    assert router.poll() == ["before"]
    router.submit("after")
    assert router.poll() == ["after"]


def test_who_comes_while_all_are_full_overtakes_nobody_for_that(router: HoldingRouter) -> None:
    """Nobody can say where it would go, and it has its place all the same: as the shortest of its time."""
    router.report(A, backlog_s=5.0)
    router.submit("short", 5)
    assert router.poll() == []
    router.report(A, num_waiting=256)
    router.clock.advance(0.5)
    router.submit("long", 400)
    assert router.poll() == []
    router.report(A, num_waiting=255)
    assert router.poll() == ["short", "long"]


def test_who_stands_back_does_so_while_all_are_full_too(router: HoldingRouter) -> None:
    router.report(A, num_waiting=256)
    router.held.submit(query("stands back")._replace(priority=1))
    router.clock.advance(1.0)
    router.submit("urgent")
    assert router.poll() == []
    router.report(A, num_waiting=255)
    assert router.poll()[0] == "urgent"


def test_who_has_gone_is_placed_nowhere(router: HoldingRouter) -> None:
    router.report(A, backlog_s=1.0)
    router.submit("q")
    assert router.held.withdraw(RequestId("q"))
    assert not router.held.withdraw(RequestId("q"))
    router.report(A)
    assert router.poll() == []
    assert router.held.next_poll_at() is None


def test_a_deadline_that_passes_here_ends_the_request(router: HoldingRouter) -> None:
    router.report(A, backlog_s=0.5)
    now = router.clock()
    router.submit("q", since=now - 1.0, deadline=now + 2.0)
    router.submit("r", deadline=now + 1.0)
    router.report(A, backlog_s=10.0)  # more than it said
    assert router.held.next_poll_at() is not None
    router.clock.advance(1.5)
    [late] = router.held.poll()
    assert (late.request_id, late.waited_s) == ("r", 1.5)
    router.clock.advance(0.5)
    [late] = router.held.poll()
    assert isinstance(late.error, DeadlineExceeded)
    assert (late.error.deadline_s, late.error.waited_s) == pytest.approx((3.0, 3.0))
    assert len(router.held) == 0


def test_with_the_last_replica_hope_goes_too(router: HoldingRouter) -> None:
    router.report(A, backlog_s=1.0)
    router.submit("q")
    router.routing.replica_lost(A)
    [departure] = router.held.poll()
    assert isinstance(departure.error, NoReplica)
    with pytest.raises(NoReplica):
        router.submit("r")


def test_a_replica_that_drains_gets_nothing_of_what_is_held() -> None:
    router = HoldingRouter(2)
    router.report(A, backlog_s=0.5)
    router.report(B, backlog_s=0.6)
    router.submit("q")
    assert router.poll() == []
    router.report(A, is_draining=True)
    assert router.poll() == []
    router.report(B, backlog_s=0.05)
    [departure] = router.held.poll()
    assert departure.placement is not None
    assert departure.placement.replica_id == B


def test_where_all_are_leaving_their_successors_are_waited_for() -> None:
    """The last old replica of a rolling update says that it leaves before Serve tells who has come."""
    router = HoldingRouter()
    router.report(A, backlog_s=1.0)
    router.submit("held")
    router.report(A, is_draining=True)
    assert router.held.poll() == []
    router.submit("new")
    router.clock.advance(1.0)
    assert router.held.poll() == []
    router.routing.update_replicas({A: info(), B: info()})
    router.report(B)
    assert sorted(router.poll()) == ["held", "new"]


def test_successors_are_not_waited_for_for_ever() -> None:
    router = HoldingRouter()
    router.report(A, is_draining=True)
    router.submit("q")
    router.clock.advance(SUCCESSION_S - 0.1)
    assert router.held.poll() == []
    router.clock.advance(0.2)
    [departure] = router.held.poll()
    assert isinstance(departure.error, NoReplica)


def handed_over(name: str, by: ReplicaId = A) -> RouteQuery:
    return query(name, excluded=frozenset({by}), is_handed_over=True)


@pytest.mark.parametrize("is_listed", [True, False])
def test_what_the_only_replica_handed_over_waits_for_its_successor(is_listed: bool) -> None:
    """Serve may have taken it off the list before it hands over what it could not finish."""
    router = HoldingRouter()
    router.report(A, is_draining=True)
    if not is_listed:
        router.routing.update_replicas({})
    router.held.submit(handed_over("q"))
    assert router.held.poll() == []
    router.clock.advance(SUCCESSION_S - 0.1)
    router.routing.update_replicas({B: info()})
    router.report(B)
    [departure] = router.held.poll()
    assert departure.placement is not None
    assert departure.placement.replica_id == B


@pytest.mark.parametrize("is_listed", [True, False])
def test_what_was_handed_over_does_not_wait_for_a_successor_for_ever(is_listed: bool) -> None:
    router = HoldingRouter()
    router.report(A, is_draining=True)
    if not is_listed:
        router.routing.update_replicas({})
    router.held.submit(handed_over("q"))
    router.clock.advance(SUCCESSION_S - 0.1)
    assert router.held.poll() == []
    router.clock.advance(0.2)
    [departure] = router.held.poll()
    assert isinstance(departure.error, NoReplica)
    assert len(router.held) == 0


def test_a_busy_replica_that_may_not_take_it_makes_nobody_wait_longer_for_a_successor() -> None:
    router = HoldingRouter(2)
    router.report(B, backlog_s=1000.0)
    router.routing.update_replicas({B: info()})
    router.held.submit(query("q", excluded=frozenset({A, B}), is_handed_over=True))
    router.clock.advance(SUCCESSION_S - 0.1)
    assert router.held.poll() == []
    router.clock.advance(0.2)
    [departure] = router.held.poll()
    assert isinstance(departure.error, NoReplica)


def test_a_deadline_ends_the_wait_for_a_successor() -> None:
    router = HoldingRouter()
    router.routing.update_replicas({})
    router.held.submit(handed_over("q"), deadline=router.clock() + 1.0)
    router.clock.advance(1.0)
    [departure] = router.held.poll()
    assert isinstance(departure.error, DeadlineExceeded)


def test_without_a_hand_over_an_empty_fleet_is_told_at_once() -> None:
    router = HoldingRouter()
    router.routing.update_replicas({})
    with pytest.raises(NoReplica):
        router.held.submit(query("new"))
    with pytest.raises(NoReplica):
        router.held.submit(query("lost", excluded=frozenset({A})))
    assert len(router.held) == 0


def test_a_request_is_held_once(router: HoldingRouter) -> None:
    router.report(A, backlog_s=1.0)
    router.submit("q")
    with pytest.raises(ValueError, match="'q' is held already"):
        router.submit("q")
    with pytest.raises(ConfigError, match="fastest"):
        router.held.submit(query("r", policy="fastest"))
    assert len(router.held) == 1


def test_while_speeds_are_unknown_nothing_waits() -> None:
    """Backlogs cannot be told in seconds yet: the engines' queues have to do."""
    clock = FakeClock()
    routing = Routing(config(), clock=clock)
    routing.update_replicas({A: info()})
    held = HeldRequests(routing, OPTIONS, clock)
    for index in range(5):
        held.submit(query(f"q{index}", 100))
        assert len(held.poll()) == 1


def test_held_requests_count_as_queued(router: HoldingRouter) -> None:
    """The dearer queues make it to compute again what is cached, wherever they are."""
    router.report(A, backlog_s=10.0)
    before = router.routing.weigh(query("probe")).request.shape.recompute_weight
    for index in range(10):
        router.submit(f"q{index}")
    router.clock.advance(5.0)
    after = router.routing.weigh(query("probe")).request.shape.recompute_weight
    assert before == 1.5
    assert after > 20.0


def test_what_other_routers_hold_counts_too(router: HoldingRouter) -> None:
    """Nobody tells; requests come to all routers alike, so each holds about as many."""
    others = Routing(config(), clock=router.clock, peers=lambda: (1, 3))
    others.update_replicas(router.infos)
    others.on_load(A, load())
    for routing, num_held in ((router.routing, 3), (others, 1)):
        routing.note_held(num_held)
        routing.weigh(query("first"))  # the mean begins with what it sees first
    weights = [
        routing.weigh(query("probe")).request.shape.recompute_weight for routing in (router.routing, others)
    ]
    assert weights[0] == weights[1] > 2.0
