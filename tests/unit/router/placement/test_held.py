"""Requests that wait at the router: who leaves, when, and in which order."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from cache.errors import ConfigError, DeadlineExceeded
from cache.events import StepTimeModel
from cache.types import ReplicaId, RequestId
from router.errors import AllBusy, NoReplica
from router.placement.held import SUCCESSION_S, Departure, HeldRequests, HoldOptions
from router.placement.routing import Routing
from tests.fakes.router import BLOCK_SIZE, FakeClock, config, info, load, query, replica_id

A, B = replica_id(0), replica_id(1)
OPTIONS = HoldOptions(max_backlog_s=0.1, window=24, aging=0.1, age_floor_s=20.0, max_held_per_replica=10)
TOKEN_S = (
    0.0001 + 0.011 / 512
)  # what a queued token of the paper replicas takes, in prompts of a step or more


@dataclass
class Router:
    """A Routing over replicas on paper, and the requests it holds."""

    num_replicas: int = 1
    options: HoldOptions = OPTIONS
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.routing = Routing(config(), clock=self.clock)
        self.infos = {replica_id(i): info() for i in range(self.num_replicas)}
        self.routing.update_replicas(self.infos)
        for replica in self.infos:
            self.report(replica)
        self.held = HeldRequests(self.routing, self.options, self.clock)

    def report(self, replica: ReplicaId, backlog_s: float = 0.0, **changes: object) -> None:
        """The replica says it has so much queued."""
        tokens = round(backlog_s / TOKEN_S)
        self.routing.on_load(replica, load(queued_uncached_tokens=tokens, **changes))

    def submit(self, name: str, num_blocks: int = 1, **times: float) -> None:
        self.held.submit(query(name, num_blocks), **times)

    def poll(self) -> list[str]:
        """Names of those that leave placed."""
        return [d.request_id for d in self.held.poll() if d.placement is not None]


@pytest.fixture
def router() -> Router:
    return Router()


def test_an_idle_replica_gets_a_request_at_once(router: Router) -> None:
    router.submit("q")
    [departure] = router.held.poll()
    assert departure == Departure(RequestId("q"), 0.0, departure.placement)
    assert departure.placement is not None
    assert departure.placement.replica_id == A
    assert router.routing.statistics().in_flight == 1
    assert len(router.held) == 0
    assert router.held.next_poll_at() is None


def test_a_request_waits_until_its_replica_has_nearly_caught_up(router: Router) -> None:
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


def test_the_shorter_of_two_may_leave_earlier(router: Router) -> None:
    """Worked by hand: 0.2 s and 0.6 s of prefill, mean 0.4 s. The short one is sent behind
    0.2 * exp(-0.2 / 0.4) = 0.12 s, the long one behind 0.2 * exp(-0.6 / 0.4) = 0.045 s: another router that
    held the long one alone would have heard of the short one by then.
    """
    router = Router(options=replace(OPTIONS, aging=0.0))
    router.report(A, backlog_s=1.0)
    router.submit("short", 104)
    router.submit("long", 309)
    for name, backlog_s in (("short", 0.121), ("long", 0.0447)):
        router.report(A, backlog_s=backlog_s + 0.004)
        assert router.poll() == []
        router.report(A, backlog_s=backlog_s - 0.004)
        assert router.poll() == [name]
        router.routing.release(RequestId(name))


def test_a_slower_replica_is_not_left_idle_while_others_wait() -> None:
    """Half as slow again, empty, and a crowd of cold prompts: what computing them costs the fleet is no
    reason to wait for the faster one, however long the queue."""
    router = Router(num_replicas=2)
    fast = load().step_time
    assert fast is not None
    slow = StepTimeModel(*(1.5 * each for each in msgspec.structs.astuple(fast)))
    router.report(B, step_time=slow)
    for number in range(8):
        router.submit(str(number), 45)
    placed = {d.placement.replica_id for d in router.held.poll() if d.placement is not None}
    assert placed == {A, B}


def slower(times: float) -> StepTimeModel:
    """Than the paper replicas."""
    fast = load().step_time
    assert fast is not None
    return StepTimeModel(*(times * each for each in msgspec.structs.astuple(fast)))


def test_who_waits_before_it_for_the_same_replica_is_work_before_it() -> None:
    """Worked by hand: prompts of 0.78 s, 2.58 s at B. The first goes to A. The second and the third
    wait for A, which would answer them after 1.56 and 2.34 s. The fourth would wait for those, too, and be
    answered after 3.11 s: it is sent to B. The fifth finds B busy, and waits for A again."""
    router = Router(num_replicas=2)
    router.report(B, step_time=slower(3.3))
    for number in range(5):
        router.submit(str(number), 400)
    left = {d.request_id: d.placement.replica_id for d in router.held.poll() if d.placement is not None}
    assert left == {"0": A, "3": B}
    assert router.poll() == []


def test_who_waited_before_it_and_left_is_work_before_it_no_more() -> None:
    router = Router(num_replicas=1)
    router.report(A, backlog_s=1.0)
    router.submit("first", 100)
    router.submit("second", 100)
    assert router.poll() == []
    router.held.withdraw(RequestId("first"))
    router.report(A, backlog_s=0.0)
    assert router.poll() == ["second"]


def test_who_has_grown_old_may_leave_first_of_all(router: Router) -> None:
    """However long its prompt: else those that come later would pass it for ever."""
    router.report(A, backlog_s=100.0)
    router.submit("long", 300)
    router.clock.advance(20.0)
    router.submit("young", 200)
    router.report(A, backlog_s=0.19)
    assert router.poll() == ["long"]


def test_it_leaves_for_whoever_is_best_by_then() -> None:
    """At once it would have been sent to the holder, whose queue turned out longer than it looked."""
    router = Router(2)
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
    router = Router(2)
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


def test_short_work_goes_first(router: Router) -> None:
    router.report(A, backlog_s=1.0)
    for name, num_blocks in (("long", 300), ("short", 1), ("middle", 60)):
        router.submit(name, num_blocks)
    router.report(A)
    assert router.poll() == ["short", "middle"]  # which takes it over the limit: 60 blocks are 0.12 s
    router.report(A, admitted=(RequestId("short"), RequestId("middle")))
    assert router.poll() == ["long"]


def test_waiting_outweighs_work_in_time(router: Router) -> None:
    """300 blocks take 0.58 s: after six seconds they are no longer behind a newcomer that takes none."""
    router.report(A, backlog_s=100.0)
    router.submit("long", 300)
    router.clock.advance(6.0)
    router.submit("short", 1)
    router.report(A)
    assert router.poll() == ["long"]


def test_nobody_old_stands_behind_somebody_young() -> None:
    router = Router(options=replace(OPTIONS, aging=0.0))
    router.report(A, backlog_s=100.0)
    router.submit("oldest, longest", 1000)
    router.clock.advance(1.0)
    router.submit("old", 300)
    router.clock.advance(20.0)
    router.submit("young", 1)
    for expected in (["oldest, longest"], ["old"], ["young"]):
        router.report(A)
        assert router.poll() == expected
        for name in expected:
            router.routing.release(RequestId(name))


def test_only_the_window_is_decided_for() -> None:
    router = Router(2, options=replace(OPTIONS, window=2))
    only_a = frozenset({B})
    router.report(A, backlog_s=5.0)
    for name in ("1", "2"):
        router.held.submit(query(name, 1, excluded=only_a))
    router.submit("3", 2)  # B is free, but it is third
    assert router.poll() == []
    router.held.withdraw(RequestId("1"))
    assert router.poll() == ["3"]


def test_too_many_are_refused_with_a_time_to_come_back(router: Router) -> None:
    router.report(A, backlog_s=100.0)
    for index in range(10):
        router.submit(f"q{index}", 600)
    with pytest.raises(AllBusy) as caught:
        router.submit("one too many")
    assert caught.value.num_replicas == 1
    assert caught.value.retry_after_s == pytest.approx(0.96 + 19 * 0.011, rel=0.1)  # until one has left
    assert RequestId("one too many") not in router.held
    assert router.held.withdraw(RequestId("q3"))
    router.submit("now there is room")


def test_who_would_wait_too_long_is_refused_and_told_when_there_will_be_room() -> None:
    """Three replicas with 1, 2 and 6 s of backlog, and 3 s held. The level is 3 s on the first two."""
    router = Router(3, options=replace(OPTIONS, max_wait_s=2.6, max_held_per_replica=100))
    for index, backlog_s in enumerate((1.0, 2.0, 6.0)):
        router.report(replica_id(index), backlog_s=backlog_s)
    num_blocks = round(1.0 / TOKEN_S / BLOCK_SIZE)
    for name in "abc":
        router.submit(name, num_blocks)  # of a second each, the level then 2.0, 2.5 and 3.0
    with pytest.raises(AllBusy) as caught:
        router.submit("d")
    assert caught.value.retry_after_s == 1.0  # sooner than anybody is told to come back
    assert len(router.held) == 3
    assert router.routing.statistics().all_busy == 1
    router.clock.advance(0.6)
    router.submit("d")  # time has made room, nobody else has


def test_in_overload_those_let_in_before_it_was_known_wait_no_longer_than_others() -> None:
    """One replica, prompts of 0.1 s, twenty a second: at other times they may wait for ten seconds."""
    options = replace(OPTIONS, max_wait_s=10.0, overload_wait_s=0.5, max_held_per_replica=1000)
    router = Router(options=options)
    num_blocks, backlog_s, refused, late = round(0.1 / TOKEN_S / BLOCK_SIZE), 0.0, [], []
    for number in range(120):
        router.report(A, backlog_s=backlog_s)
        try:
            router.submit(f"{number}", num_blocks)
        except AllBusy:
            refused.append(number)
        departures = router.held.poll()
        backlog_s += 0.1 * sum(departure.placement is not None for departure in departures)
        late += [departure for departure in departures if departure.error is not None]
        backlog_s = max(0.0, backlog_s - 0.05)
        router.clock.advance(0.05)
    first_s = refused[0] * 0.05
    assert 4 * 0.5 <= first_s <= 4.0
    assert len(refused) >= (6.0 - first_s) * 20 / 2 * 0.8
    assert late
    assert all(isinstance(each.error, AllBusy) for each in late)
    assert all(each.waited_s >= 1.5 * 0.5 for each in late)
    assert router.routing.statistics().all_busy == len(refused) + len(late)
    assert len(router.held) * 0.1 <= 0.5 + 0.2
    lost = query("lost", 1, excluded=frozenset({B}))
    router.held.submit(lost, since=router.clock() - 60.0)  # may have begun to answer
    assert all(each.error is None for each in router.held.poll())


def test_those_turned_away_are_not_told_to_come_back_together() -> None:
    router = Router(options=replace(OPTIONS, max_wait_s=2.0))
    router.report(A, backlog_s=5.0)
    num_blocks = round(1.0 / TOKEN_S / BLOCK_SIZE)
    told = []
    for name in "abcd":
        with pytest.raises(AllBusy) as caught:
            router.submit(name, num_blocks)
        told.append(caught.value.retry_after_s)
    assert told == pytest.approx([3.0, 4.0, 5.0, 6.0], abs=0.1)


def test_an_idle_replica_takes_whoever_comes() -> None:
    """Though others wait here: for the one that holds their prefix."""
    router = Router(2, options=replace(OPTIONS, max_wait_s=0.5))
    router.report(A, backlog_s=0.4)
    only_a = frozenset({B})
    for name in "abc":
        router.held.submit(query(name, 300, excluded=only_a))
    router.submit("new", 300)
    assert router.poll() == ["new"]


def test_an_idle_replica_that_nobody_wants_lets_nobody_in() -> None:
    """It once measured itself as a hundred times slower, and whoever came in the meantime was taken in."""
    router = Router(2, options=replace(OPTIONS, max_wait_s=1.0, max_held_per_replica=1000))
    slow = StepTimeModel(1.0, 0.01, 0.0, 0.1)
    router.report(A, backlog_s=0.5)
    router.routing.on_load(B, load(step_time=slow))
    for number in range(100):
        with contextlib.suppress(AllBusy):
            router.submit(str(number), 100)
    assert 3 <= len(router.held) <= 15
    assert router.poll() == []


def test_taken_for_places_a_replica_is_waited_for_though_nothing_is_queued() -> None:
    """64 sequences of 8 s each: one ends every 0.125 s, and 40 wait for that."""
    router = Router(options=replace(OPTIONS, max_wait_s=5.0))
    placement = router.routing.choose(query("first"))
    router.routing.first_token(placement.request_id, A, 0)
    router.clock.advance(8.0)
    router.routing.release(placement.request_id)
    router.report(A, num_running=64, num_waiting=38)
    router.submit("still in time")
    router.report(A, num_running=64, num_waiting=40)
    with pytest.raises(AllBusy):
        router.submit("too late")


def test_a_request_waits_here_while_all_places_are_taken() -> None:
    """Nothing is queued, so it would be sent; but 64 sequences of 8 s each end one every 0.125 s."""
    router = Router(2, options=replace(OPTIONS, max_backlog_s=0.05))
    first = router.routing.choose(query("first"))
    router.routing.first_token(first.request_id, first.replica_id, 0)
    router.clock.advance(8.0)
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


def test_a_deadline_that_cannot_be_met_is_not_waited_for(router: Router) -> None:
    """Behind what goes before it, not behind what is held for later."""
    router.report(A, backlog_s=1.0)
    now = router.clock()
    router.submit("long", 1000)  # two seconds
    router.submit("short", 10, deadline=now + 1.1)
    with pytest.raises(AllBusy) as caught:
        router.submit("hopeless", 1100, deadline=now + 4.0)
    assert caught.value.retry_after_s == pytest.approx(1.0 + 2.0 + 2.1 - 4.0, abs=0.1)
    router.submit("in time", 1100, deadline=now + 6.0)


def test_unmeasured_replicas_are_bounded_by_tokens() -> None:
    """256 full steps of 512 count as the longest wait."""
    router = Router(options=replace(OPTIONS, max_wait_s=10.0))
    router.report(A, num_waiting=3, step_time=None)
    router.routing.on_load(A, load(queued_uncached_tokens=256 * 512 - 100, num_waiting=3, step_time=None))
    router.submit("fits")
    router.routing.on_load(A, load(queued_uncached_tokens=256 * 512 + 100, num_waiting=3, step_time=None))
    with pytest.raises(AllBusy):
        router.submit("too much")


def test_in_overload_long_work_is_old_after_half_of_the_longest_wait() -> None:
    made = HoldOptions.of(config(max_wait_s=4.0))
    assert (made.age_floor_s, made.max_wait_s) == (2.0, 4.0)
    unbounded = HoldOptions.of(config(max_wait_s=None))
    assert (unbounded.age_floor_s, unbounded.max_wait_s) == (20.0, float("inf"))


def test_full_replicas_are_waited_for(router: Router) -> None:
    """Sent at once it would be refused with AllBusy; here it may wait until somebody has room."""
    router.report(A, num_waiting=256)
    router.submit("q")
    assert router.poll() == []
    assert RequestId("q") in router.held
    router.report(A)
    assert router.poll() == ["q"]


def test_who_has_gone_is_placed_nowhere(router: Router) -> None:
    router.report(A, backlog_s=1.0)
    router.submit("q")
    assert router.held.withdraw(RequestId("q"))
    assert not router.held.withdraw(RequestId("q"))
    router.report(A)
    assert router.poll() == []
    assert router.held.next_poll_at() is None


def test_a_deadline_that_passes_here_ends_the_request(router: Router) -> None:
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


def test_with_the_last_replica_hope_goes_too(router: Router) -> None:
    router.report(A, backlog_s=1.0)
    router.submit("q")
    router.routing.replica_lost(A)
    [departure] = router.held.poll()
    assert isinstance(departure.error, NoReplica)
    with pytest.raises(NoReplica):
        router.submit("r")


def test_a_replica_that_drains_gets_nothing_of_what_is_held() -> None:
    router = Router(2)
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
    router = Router()
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
    router = Router()
    router.report(A, is_draining=True)
    router.submit("q")
    router.clock.advance(SUCCESSION_S - 0.1)
    assert router.held.poll() == []
    router.clock.advance(0.2)
    [departure] = router.held.poll()
    assert isinstance(departure.error, NoReplica)


def test_a_request_is_held_once(router: Router) -> None:
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


def test_held_requests_count_as_queued(router: Router) -> None:
    """The dearer queues make it to compute again what is cached, wherever they are."""
    router.report(A, backlog_s=10.0)
    before = router.routing.weigh(query("probe")).request.shape.recompute_weight
    for index in range(10):
        router.submit(f"q{index}")
    router.clock.advance(5.0)
    after = router.routing.weigh(query("probe")).request.shape.recompute_weight
    assert before == 2.0
    assert after > 20.0


def test_what_other_routers_hold_counts_too(router: Router) -> None:
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


def test_a_match_that_arrives_while_waiting_counts() -> None:
    """Its own prefill is what is left of it now, and its place in the order follows."""
    router = Router()
    router.report(A, backlog_s=1.0)
    router.submit("short", 1)
    router.submit("shorter by then", 120)
    router.submit("long", 110)
    placement = router.routing.choose(query("shorter by then", 120, request_id=RequestId("elsewhere")))
    router.routing.first_token(placement.request_id, A, 0)
    router.clock.advance(0.1)  # what is cached by now is asked again only so often
    router.report(A, admitted=(placement.request_id,))
    assert router.poll() == ["short", "long"]
    router.submit("long again", 109)
    router.report(A, admitted=(RequestId("short"), RequestId("long")))
    assert router.poll() == ["shorter by then", "long again"]
    record = next(r for r in router.routing.records() if r.request_id == "shorter by then")
    assert record.cached_tokens == 120 * BLOCK_SIZE
