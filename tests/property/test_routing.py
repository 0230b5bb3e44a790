"""Laws of the decision under any order of requests, reports, losses and returns.

A pick is always a candidate: alive, not excluded, not draining, not full. What is booked is released.
When the last replica has gone nothing is left of any.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.block_hash import hints as to_hints
from cache.events import FORMAT_VERSION, Digest, EventBatch, RequestEnded
from cache.scheduling_order import SchedulingOrder
from cache.types import ReplicaId, RequestId
from router.errors import AllBusy, NoReplica
from router.placement.routing import RouteQuery, Routing
from router.policies import NAMES
from tests.fakes.router import (
    BLOCK_SIZE,
    OTHER_FINGERPRINT,
    FakeClock,
    chain,
    config,
    info,
    load,
    replica_id,
    told,
)

REPLICAS = [replica_id(i) for i in range(4)]
INFOS = {
    replica: info(
        max_running=3,
        max_waiting=2,
        scheduling_order=list(SchedulingOrder)[i % 3],
        **({"fingerprint": OTHER_FINGERPRINT} if i == 3 else {}),
    )
    for i, replica in enumerate(REPLICAS)
}


class RoutingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.routing = Routing(config(), clock=self.clock)
        self.running: set[ReplicaId] = set()
        self.draining: set[ReplicaId] = set()
        self.open: dict[RequestId, list[ReplicaId]] = {}
        self.num_requests = 0

    @rule(running=st.sets(st.sampled_from(REPLICAS)))
    def membership(self, running: set[ReplicaId]) -> None:
        self.routing.update_replicas({replica: INFOS[replica] for replica in running})
        self.draining &= self.running & running
        self.running = running

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.running)))
        self.routing.replica_lost(gone)
        self.running.discard(gone)
        self.draining.discard(gone)
        self.routing.update_replicas({replica: INFOS[replica] for replica in self.running})

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_draining=st.booleans(), running=st.integers(0, 3), waiting=st.integers(0, 2))
    def report(self, data: st.DataObject, is_draining: bool, running: int, waiting: int) -> None:
        replica = data.draw(st.sampled_from(sorted(self.running)))
        admitted = data.draw(st.lists(st.sampled_from(sorted(self.open)), max_size=3)) if self.open else []
        gone = data.draw(st.lists(st.sampled_from(sorted(self.open)), max_size=2)) if self.open else []
        ended = [
            RequestEnded(name, data.draw(st.integers(0, 1)), data.draw(st.integers(0, 1))) for name in gone
        ]
        prompt = data.draw(st.sampled_from("abc"))
        tenants = data.draw(st.sets(st.sampled_from(["", "other"])))
        said = load(
            num_running=running,
            num_waiting=waiting,
            queued_uncached_tokens=waiting * 500,
            is_draining=is_draining,
            admitted=tuple(admitted),
            ended=tuple(ended),
            queued=tuple(told(*[10] * waiting, tenant=tenant) for tenant in sorted(tenants) if waiting),
        )
        stored = tuple(to_hints(chain(prompt, 6)))
        self.routing.on_events(replica, EventBatch(FORMAT_VERSION, 1, 1, stored, (), Digest(), said))
        (self.draining.add if is_draining else self.draining.discard)(replica)
        for each in ended:  # all are first attempts here
            assert each.attempt or self.routing._loads.placed(each.request_id) != replica

    @rule(
        prompt=st.sampled_from("abcd"),
        excluded=st.frozensets(st.sampled_from(REPLICAS), max_size=2),
        policy=st.sampled_from([None, *NAMES]),
        retried=st.booleans(),
    )
    def choose(self, prompt: str, excluded: frozenset[ReplicaId], policy: str | None, retried: bool) -> None:
        self.num_requests += 1
        request_id = RequestId(str(self.num_requests))
        if retried and self.open:
            request_id = next(iter(self.open))
        query = RouteQuery(request_id, chain(prompt, 6), 6 * BLOCK_SIZE + 1, excluded, policy)
        alive = self.running - self.draining - excluded
        full = {r for r in alive if self._is_full(r)}
        try:
            placement = self.routing.choose(query)
        except NoReplica:
            assert not alive
        except AllBusy:
            assert alive
            assert full == alive
        else:
            assert len(set(placement.ranks)) == len(placement.ranks)
            assert set(placement.ranks) <= alive - full
            assert placement.block_hashes == () or REPLICAS[3] not in placement.ranks
            self.open[request_id] = list(placement.ranks)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        self.routing.routed(
            data.draw(st.sampled_from(sorted(self.open))), data.draw(st.sampled_from(REPLICAS))
        )

    @precondition(lambda self: self.open)
    @rule(data=st.data(), replica=st.sampled_from(REPLICAS), again=st.booleans())
    def answer(self, data: st.DataObject, replica: ReplicaId, again: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        if again:
            self.routing.continued(request_id)
        else:
            self.routing.first_token(request_id, replica, 0)
        assert request_id not in self.routing.queues._by_id

    @precondition(lambda self: self.open)
    @rule(data=st.data(), candidates=st.lists(st.sampled_from(REPLICAS), unique=True))
    def rerank(self, data: st.DataObject, candidates: list[ReplicaId]) -> None:
        ranks = self.routing.rerank(data.draw(st.sampled_from(sorted(self.open))), candidates)
        assert len(set(ranks)) == len(ranks)
        assert set(ranks) <= set(candidates)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: st.DataObject, twice: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        for _ in range(2 if twice else 1):
            self.routing.release(request_id)
        del self.open[request_id]

    @rule(seconds=st.sampled_from([0.01, 1.0, 6.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def what_is_open_is_in_flight(self) -> None:
        seen = self.routing.statistics()
        assert seen.in_flight == len(self.open)
        assert {r.replica_id for r in seen.replicas} == self.running
        for replica in seen.replicas:
            assert 0 <= replica.unseen <= replica.in_flight
            assert replica.backlog_s >= 0
        assert sum(replica.in_flight for replica in seen.replicas) <= len(self.open)

    @invariant()
    def who_waits_somewhere_is_booked_there(self) -> None:
        waiting = self.routing.queues._by_id
        assert waiting.keys() <= self.open.keys()
        for request_id, sent in waiting.items():
            assert sent.replica_id in self.running
            assert self.routing._loads.placed(request_id) == sent.replica_id
        unnamed = Counter(sent.replica_id for sent in waiting.values() if sent.named_by is None)
        queues = self.routing.queues._queues
        assert queues.keys() == self.running
        lines = {name: list(queue.lines.values()) for name, queue in queues.items()}
        assert {name: sum(len(line.sizes) for line in of) for name, of in lines.items()} == {
            name: unnamed[name] for name in lines
        }
        assert all(line.num_prompts > 0 for of in lines.values() for line in of)
        assert self.routing.queues._waiting == {name: queues[name] for name, of in lines.items() if of}

    def teardown(self) -> None:
        for request_id in self.open:
            self.routing.release(request_id)
        assert all(r.in_flight == r.unseen == 0 for r in self.routing.statistics().replicas)
        assert len(self.routing.queues) == 0
        self.routing.update_replicas({})
        seen = self.routing.statistics()
        assert (seen.in_flight, seen.index_entries, seen.replicas) == (0, 0, ())

    def _is_full(self, replica: ReplicaId) -> bool:
        self.routing._loads.expire()  # as `choose` does first
        return self.routing._loads.view(replica).is_full


RoutingMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestRouting = RoutingMachine.TestCase
