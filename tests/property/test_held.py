"""Laws of late binding, whatever comes, goes, is reported or lost.

Each request that was taken in leaves exactly once: placed, refused or withdrawn. Who leaves is, at that
moment, the first in the order of those that could; and nobody waits for ever while others come.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.errors import DeadlineExceeded
from cache.events import StepTimeModel
from cache.types import ReplicaId, RequestId
from router.errors import AllBusy, NoReplica
from router.placement.decision import Admittance, Decision, RouteQuery
from router.placement.held import RELOOK_S, SUCCESSION_S, HeldRequests
from router.placement.held_request import Departure
from router.placement.hold_options import HoldOptions
from router.placement.routing import Routing
from tests.fakes.held import HoldingRouter
from tests.fakes.router import STEP_TIME, FakeClock, config, info, load, query, replica_id

REPLICAS = [replica_id(i) for i in range(3)]
OPTIONS = HoldOptions(max_backlog_s=0.1, window=4, aging=0.1, age_floor_s=5.0, max_held_per_replica=5)


class HeldMachine(RuleBasedStateMachine):
    """Drives the held requests of a real Routing."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.routing = Routing(config(), clock=self.clock)
        self.held = HeldRequests(self.routing, OPTIONS, self.clock)
        self.waiting: dict[RequestId, float] = {}  # name -> deadline
        self.placed: dict[RequestId, ReplicaId] = {}
        self.num_requests = 0
        self.running: set[ReplicaId] = set()
        self.draining: set[ReplicaId] = set()
        self.open_at = 0.0  # when there was last a replica that was not leaving
        self.came_at = 0.0  # when a request came last
        self.handed_over: set[RequestId] = set()  # of all that came

    @rule(running=st.sets(st.sampled_from(REPLICAS)))
    def membership(self, running: set[ReplicaId]) -> None:
        self.routing.update_replicas({replica: info() for replica in running})
        self.draining &= self.running & running
        self.running = running
        self.poll()

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(), queued=st.sampled_from([0, 500, 5000, 50_000]), waiting=st.sampled_from([0, 1, 256])
    )
    def report(self, data: st.DataObject, queued: int, waiting: int) -> None:
        replica = data.draw(st.sampled_from(sorted(self.running)))
        here = sorted(name for name, where in self.placed.items() if where == replica)
        is_draining = data.draw(st.booleans())
        said = load(
            queued_uncached_tokens=queued, num_waiting=waiting, is_draining=is_draining, admitted=tuple(here)
        )
        self.routing.on_load(replica, said)
        (self.draining.add if is_draining else self.draining.discard)(replica)
        self.poll()

    @rule(
        prompt=st.sampled_from("abc"),
        num_blocks=st.sampled_from([1, 20, 300]),
        excluded=st.frozensets(st.sampled_from(REPLICAS), max_size=2),
        waited=st.sampled_from([0.0, 1.0]),
        timeout=st.sampled_from([None, 0.5, 30.0]),
        is_handed_over=st.booleans(),
    )
    def submit(
        self,
        prompt: str,
        num_blocks: int,
        excluded: frozenset[ReplicaId],
        waited: float,
        timeout: float | None,
        is_handed_over: bool,
    ) -> None:
        is_handed_over &= bool(excluded)  # by one of those
        self.num_requests += 1
        name = RequestId(str(self.num_requests))
        now = self.clock()
        deadline = None if timeout is None else now + timeout
        asked = query(
            prompt,
            num_blocks,
            request_id=name,
            excluded=excluded,
            is_handed_over=is_handed_over,
            is_again=bool(excluded),  # by that one it was let in before
        )
        try:
            self.held.submit(asked, since=now - waited, deadline=deadline)
        except NoReplica:
            assert not self.running - self.draining - excluded
            assert not is_handed_over
        except AllBusy:
            assert asked.is_new
            is_full = len(self.held) >= 5 * len(self.running - self.draining)
            assert is_full or (timeout is not None and self.is_hopeless(asked, timeout))
        else:
            self.waiting[name] = float("inf") if deadline is None else deadline
            self.came_at = now
            if is_handed_over:
                self.handed_over.add(name)
            self.poll()

    def is_hopeless(self, asked: RouteQuery, timeout: float) -> bool:
        """Behind everybody who is here its first token would come too late."""
        own_s = 0.0
        with contextlib.suppress(AllBusy):
            own_s = self.routing.weigh(asked).engine_s
        return timeout < self.routing.wait_s(self.held.engine_s) + own_s

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.held.withdraw(name)
        del self.waiting[name]

    @precondition(lambda self: self.placed)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.placed)))
        self.routing.finish(name)
        del self.placed[name]
        self.poll()

    @rule(seconds=st.sampled_from([0.01, 0.3, 3.0]))
    def time_passes(self, seconds: float) -> None:
        """As an event loop lets it pass: it comes back when it was told to."""
        end = self.clock() + seconds
        while (wake_at := self.held.next_poll_at()) is not None and wake_at <= end:
            assert wake_at > self.clock()
            self.clock.now = wake_at
            self.poll()
        self.clock.now = end
        self.poll()

    def poll(self) -> None:
        now = self.clock()
        for departure in self.held.poll():
            deadline = self.waiting.pop(departure.request_id)  # it left only once
            assert (departure.placement is None) is not (departure.error is None)
            if isinstance(departure.error, DeadlineExceeded):
                assert deadline <= now
            elif departure.error is not None:
                assert isinstance(departure.error, NoReplica)
            else:
                self.check_placed(departure)

    def check_placed(self, departure: Departure) -> None:
        assert departure.placement is not None
        chosen = departure.placement.replica_id
        assert chosen in self.running - self.draining
        self.placed[departure.request_id] = chosen

    @invariant()
    def nobody_is_lost(self) -> None:
        assert len(self.held) == len(self.waiting)
        assert all(name in self.held for name in self.waiting)
        assert self.routing.statistics().in_flight == len(self.placed)

    @invariant()
    def deadlines_are_kept(self) -> None:
        self.poll()
        assert all(deadline > self.clock() for deadline in self.waiting.values())

    @invariant()
    def nobody_is_held_without_a_replica(self) -> None:
        """Unless those that are left have just begun to leave: others may be about to come."""
        if self.running - self.draining:
            self.open_at = self.clock()
        elif self.waiting:
            assert self.draining or self.waiting.keys() <= self.handed_over
            assert self.clock() <= max(self.open_at, self.came_at) + SUCCESSION_S + RELOOK_S

    def teardown(self) -> None:
        """With idle replicas everybody leaves."""
        self.running, self.draining = set(REPLICAS), set()
        self.routing.update_replicas({replica: info() for replica in REPLICAS})
        for _ in range(self.num_requests + 1):
            for replica in REPLICAS:
                self.routing.on_load(replica, load(admitted=tuple(self.placed)))
            self.poll()
        assert not self.waiting
        for name in self.placed:
            self.routing.finish(name)
        assert self.routing.statistics().in_flight == 0


HeldMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestHeld = HeldMachine.TestCase


def one_replica(options: HoldOptions) -> tuple[Routing, HeldRequests, FakeClock]:
    clock = FakeClock()
    routing = Routing(config(), clock=clock)
    routing.update_replicas({REPLICAS[0]: info()})
    routing.on_load(REPLICAS[0], load(queued_uncached_tokens=10**9, num_waiting=1))
    return routing, HeldRequests(routing, options, clock), clock


def scaled(model: StepTimeModel, times: float) -> StepTimeModel:
    return StepTimeModel(
        times * model.base_s,
        times * model.per_token_s,
        times * model.per_attention_s,
        times * model.per_sequence_s,
    )


BODIES = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(1, 500), min_size=2, max_size=5)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=12)
@given(BODIES)
def test_what_came_together_leaves_refused_together_and_before_any_of_it_is_placed(
    bodies: list[tuple[int, list[int]]],
) -> None:
    """An overload begins: prompts of 0.1 s, twenty a second. bodies: when each comes, and its blocks."""
    options = replace(OPTIONS, window=4, max_wait_s=10.0, overload_wait_s=0.3, max_held_per_replica=1000)
    router, backlog_s = HoldingRouter(options=options), 0.0
    body_of: dict[RequestId, int] = {}
    placed, refused = set[int](), dict[int, set[RequestId]]()
    for tick in range(90):
        router.report(replica_id(0), backlog_s=backlog_s)
        asked = [query(f"alone {tick}", 52)]
        for number, (at, sizes) in enumerate(bodies):
            if at == tick:
                shared = Admittance()
                asked += [
                    query(f"{number}, {index}", blocks, part=1 / len(sizes), admittance=shared)
                    for index, blocks in enumerate(sizes)
                ]
                body_of |= {each.request_id: number for each in asked[-len(sizes) :]}
        for each in asked:
            with contextlib.suppress(AllBusy):
                router.held.submit(each)
        departures = router.held.poll()
        for departure in departures:
            if (body := body_of.get(departure.request_id)) is None:
                continue
            if departure.placement is not None:
                assert body not in refused
                placed.add(body)
            else:
                assert body not in placed
                refused.setdefault(body, set()).add(departure.request_id)
        for body, names in refused.items():
            assert len(names) == len(bodies[body][1]), "all of it, in one moment"
        work_s = 0.1 * sum(departure.placement is not None for departure in departures)
        backlog_s = max(0.0, backlog_s + work_s - 0.05)
        router.clock.advance(0.05)
    assert router.held.queue_state().is_overload


WIDE = replace(OPTIONS, window=1000, max_held_per_replica=1000)
ARRIVALS = st.lists(st.tuples(st.floats(0.0, 10.0), st.integers(1, 600)), min_size=1, max_size=20)


@given(ARRIVALS, st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([0.0, 5.0, 1e6]))
def test_they_leave_in_the_order_of_the_law(
    arrivals: list[tuple[float, int]], aging: float, age_floor_s: float
) -> None:
    """Own prefill less aging, least first; whoever is past the floor before everybody who is not, oldest
    first. All want the one replica there is, which takes one at a time."""
    routing, held, clock = one_replica(replace(WIDE, aging=aging, age_floor_s=age_floor_s))
    came: dict[RequestId, tuple[float, float]] = {}
    for number, (gap, num_blocks) in enumerate(arrivals):
        clock.advance(gap)
        name = RequestId(str(number))
        decision: Decision = routing.weigh(query(name, num_blocks))
        came[name] = (clock(), decision.prefill_s)
        held.submit(query(name, num_blocks))
    now = clock()

    def place(name: RequestId) -> tuple[bool, float, float]:
        since, own_s = came[name]
        if now - since >= age_floor_s:
            return False, since, 0.0
        return True, own_s - aging * (now - since), since

    left = []
    while len(held):
        routing.on_load(REPLICAS[0], load())
        departures = held.poll()
        assert departures
        for departure in departures:
            left.append(departure.request_id)
            routing.release(departure.request_id)
    keys = [place(name) for name in left]
    assert all(
        one[0] < other[0] or (one[0] == other[0] and one[1] <= other[1] + 1e-9)
        for one, other in itertools.pairwise(keys)
    )


@settings(max_examples=15)
@given(st.integers(50, 1000), st.integers(1, 20), st.floats(0.0, 3.0))
def test_a_long_prompt_is_not_starved_by_short_ones(long_blocks: int, burst: int, floor_s: float) -> None:
    """Short prompts keep the replica more than busy; nothing ages but the floor."""
    options = replace(WIDE, aging=0.0, age_floor_s=floor_s)
    routing, held, clock = one_replica(options)
    held.submit(query("long", long_blocks))
    submitted_at, busy_until, number = clock(), clock(), 0
    routing.on_load(REPLICAS[0], load())
    while RequestId("long") in held:
        for _ in range(burst):
            number += 1
            held.submit(query(str(number), 10))
        for departure in held.poll():
            decision_s = 0.05 if departure.request_id != "long" else 0.0
            busy_until = max(busy_until, clock()) + decision_s
            routing.release(departure.request_id)
        clock.advance(0.04)
        queued_s = max(0.0, busy_until - clock())
        routing.on_load(REPLICAS[0], load(queued_uncached_tokens=int(queued_s / 0.00012), num_waiting=1))
        assert clock() - submitted_at <= floor_s + 1.0
        if len(held) > 100:  # more of them prove nothing more
            for waiting in list(held._queue):
                if waiting != "long":
                    held.withdraw(waiting)


@given(
    times=st.floats(1.5, 8.0),
    num_requests=st.integers(2, 24),
    num_blocks=st.integers(20, 600),
    num_fast=st.integers(1, 3),
)
def test_a_slow_machine_gets_what_it_would_answer_before_the_fast_ones(
    times: float, num_requests: int, num_blocks: int, num_fast: int
) -> None:
    """Equal cold prompts that come together, an idle fleet of two kinds of machines: nobody waits for a fast
    one behind more than the slow one would take for it."""
    clock = FakeClock()
    routing = Routing(config(), clock=clock)
    slow, fleet = replica_id(0), [replica_id(index) for index in range(num_fast + 1)]
    routing.update_replicas({name: info() for name in fleet})
    for name in fleet:
        routing.on_load(name, load(step_time=scaled(STEP_TIME, times if name == slow else 1.0)))
    held = HeldRequests(routing, replace(WIDE, age_floor_s=20.0), clock)
    left: list[ReplicaId] = []
    for number in range(num_requests):
        held.submit(query(str(number), num_blocks))
        left += [each.placement.replica_id for each in held.poll() if each.placement is not None]
    alone_s = STEP_TIME.step_s(512, 0.0, 1) * (num_blocks * 16 / 512)
    rounds = (num_requests - left.count(slow)) / num_fast  # of prompts that the fast ones have or are to have
    if slow in left:
        assert rounds + 1.0 >= 0.5 * times  # it was not given what they would have answered much sooner
    else:
        assert (rounds - 1.0) * alone_s <= 1.1 * times * alone_s + 0.1
