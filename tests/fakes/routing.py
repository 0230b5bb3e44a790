"""A Routing over replicas on paper that say what they are told to."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from cache.block_hash import hints as to_hints
from cache.events import FORMAT_VERSION, Digest, EventBatch
from cache.types import BlockHash, ReplicaId
from router.placement.routing import Routing
from router.policies.base import alone
from tests.fakes.router import FakeClock, config, decisions_of, info, load, replica_id

T = TypeVar("T")


def whole(slices: Generator[None, None, T]) -> T:
    """What comes of a snapshot that is applied slice by slice, if nothing happens in between."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value


class RoutingBench:
    """A Routing over replicas on paper."""

    def __init__(
        self, num_replicas: int = 2, *, peers: Callable[[], tuple[int, int]] = alone, **settings: object
    ) -> None:
        self.clock = FakeClock()
        self.routing = Routing(config(**settings), clock=self.clock, peers=peers)
        self.records = decisions_of(self.routing)
        self.infos = {replica_id(i): info() for i in range(num_replicas)}
        self.routing.update_replicas(self.infos)
        self.seq = 0
        for replica in self.infos:
            self.say(replica)

    def say(
        self,
        replica: ReplicaId,
        stored: Sequence[BlockHash] = (),
        removed: Sequence[BlockHash] = (),
        **changes: object,
    ) -> Digest | None:
        self.seq += 1
        batch = EventBatch(
            FORMAT_VERSION,
            1,
            self.seq,
            tuple(to_hints(stored)),
            tuple(to_hints(removed)),
            Digest(),
            load(**changes),
        )
        return self.routing.on_events(replica, batch)

    def in_flight(self, replica: ReplicaId) -> int:
        return next(r.in_flight for r in self.routing.statistics().replicas if r.replica_id == replica)
