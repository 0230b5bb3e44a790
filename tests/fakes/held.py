"""A Router's held requests over replicas on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cache.block_hash import hints
from cache.events import FORMAT_VERSION, Digest, EventBatch
from cache.scheduling_order import SchedulingOrder
from cache.types import BlockHash, ReplicaId
from router.placement.held import HeldRequests
from router.placement.hold_options import HoldOptions
from router.placement.routing import Routing
from tests.fakes.router import FakeClock, config, info, load, query, replica_id

A, B = replica_id(0), replica_id(1)
OPTIONS = HoldOptions(max_backlog_s=0.1, window=24, aging=0.1, age_floor_s=20.0, max_held_per_replica=10)
# What a queued token of the paper replicas takes, in prompts of a step or more.
TOKEN_S = 0.0001 + 0.011 / 512


@dataclass
class HoldingRouter:
    """A Routing over replicas on paper, and the requests it holds."""

    num_replicas: int = 1
    options: HoldOptions = OPTIONS
    scheduling_order: SchedulingOrder = SchedulingOrder.FIRST_COME
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.routing = Routing(config(), clock=self.clock)
        each = info(scheduling_order=self.scheduling_order)
        self.infos = {replica_id(i): each for i in range(self.num_replicas)}
        self.routing.update_replicas(self.infos)
        for replica in self.infos:
            self.report(replica)
        self.held = HeldRequests(self.routing, self.options, self.clock)

    def report(self, replica: ReplicaId, backlog_s: float = 0.0, **changes: object) -> None:
        """The replica says it has so much queued."""
        tokens = round(backlog_s / TOKEN_S)
        self.routing.on_load(replica, load(queued_uncached_tokens=tokens, **changes))

    def store(self, replica: ReplicaId, blocks: Sequence[BlockHash]) -> None:
        """The replica says that it holds them, and nothing else new."""
        said = self.routing._loads[replica].load
        self.routing.on_events(
            replica, EventBatch(FORMAT_VERSION, 1, 1, tuple(hints(blocks)), (), Digest(), said)
        )

    def submit(self, name: str, num_blocks: int = 1, **times: float) -> None:
        self.held.submit(query(name, num_blocks), **times)

    def poll(self) -> list[str]:
        """Names of those that leave placed."""
        return [d.request_id for d in self.held.poll() if d.placement is not None]
