"""Replicas on paper that hold prefixes, and Routers that ask them to: no engines, no sockets, no Serve."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cache.block_hash import BlockHasher, PackedHashes
from cache.engine_report import EngineReport, HeldPin
from cache.errors import PinsFull
from cache.messages import (
    Delta,
    FinishReason,
    GenerateRequest,
    HeldPrefix,
    InheritPin,
    PinLease,
    ReleasePin,
    ReplicaInfo,
)
from cache.types import PinId, ReplicaId
from router.dispatch.dispatcher import Dispatcher
from router.errors import ReplicaLost
from router.fleet.engine_series import EngineView
from router.metrics import RouterMetrics
from router.placement.routing import Routing
from router.prefixes.copies import Copies
from router.prefixes.directory import PrefixDirectory
from router.prefixes.keeper import PrefixKeeper
from router.prefixes.prefix import Prefix, Turn
from router.prefixes.succession import Succession
from router.prefixes.tombstones import GivenBack
from tests.fakes.reports import an_engine_report
from tests.fakes.router import BLOCK_SIZE, FINGERPRINT, FakeClock, config, info, load

MAX_PINNED = 10  # blocks of each replica
MAX_SECONDS = 86_400.0  # that anything is held for


@dataclass
class PaperReplica:
    """What a replica would hold."""

    info: ReplicaInfo
    pins: dict[PinId, tuple[PinLease, int]] = field(default_factory=dict)
    tokens: dict[PinId, array[int]] = field(default_factory=dict)  # of each
    taken: int = 0  # blocks of pins of others, which its next report tells of but its room does not
    epoch: int = 1
    number: int = 1
    script: Callable[[GenerateRequest], None] | None = None  # raises what it is to raise
    gate: asyncio.Event | None = None  # it computes until this is set

    @property
    def left(self) -> int:
        return MAX_PINNED - self.taken - sum(blocks for _, blocks in self.pins.values())

    def report(self) -> EngineReport:
        self.number += 1
        told = tuple(
            HeldPin(pin, lease.owner, blocks, lease.copies, lease.created_at, lease.expires_at, lease.keeper)
            for pin, (lease, blocks) in self.pins.items()
        )
        used = sum(blocks for _, blocks in self.pins.values())
        return an_engine_report(
            epoch=self.epoch,
            number=self.number,
            pinned_blocks=used,
            max_pinned_blocks=MAX_PINNED if self.info.has_prefix_cache else 0,
            pins=told,
        )


class PaperFleet:
    """Replicas, shared by however many Routers."""

    def __init__(self, num_replicas: int = 3, **changes: Any) -> None:
        self.clock = FakeClock()
        self.replicas = {ReplicaId(f"r{i}"): PaperReplica(info(**changes)) for i in range(num_replicas)}
        self.reports: dict[ReplicaId, EngineReport] = {}
        self.released: list[tuple[PinId, ReplicaId]] = []
        self.asked: list[ReplicaId] = []
        self.requests: list[GenerateRequest] = []  # as they asked
        self.routers: list[PaperRouter] = []
        self.num_routers = 0  # that there ever were
        self.silent: set[str] = set()  # Routers that answer no other
        self.deaf: set[ReplicaId] = set()  # replicas that no call reaches
        self.mute: set[ReplicaId] = set()  # whose reports and answers reach nobody
        self.num_rounds = 0  # in which Routers were asked what they keep
        self.turns = {"alice": Turn("alice's", 3.0, 2), "bob": Turn("bob's", 1.0, 0)}  # by owner
        self.tell()

    def tell(self) -> None:
        """Every replica reports."""
        self.reports |= {
            name: replica.report() for name, replica in self.replicas.items() if name not in self.mute
        }

    def lose(self, name: ReplicaId) -> None:
        """It dies, and Serve says so."""
        del self.replicas[name]
        self.reports.pop(name, None)
        for router in self.routers:
            router.routing.update_replicas({name: each.info for name, each in self.replicas.items()})

    def join(self, name: ReplicaId) -> None:
        """A new one comes, and reports."""
        self.replicas[name] = PaperReplica(info())
        for router in self.routers:
            router.routing.update_replicas({name: each.info for name, each in self.replicas.items()})
            router.routing.on_load(name, load())
        self.tell()

    async def routers_up(self) -> frozenset[str]:
        """What `FleetMetrics.hear_all` says."""
        return frozenset(router.keeper.name for router in self.routers) - self.silent

    async def kept_prefixes(self, asker: str, timeout_s: float) -> list[bytes | None]:
        """As every Router's `OtherRouters`; silent ones do not answer."""
        self.num_rounds += 1
        return [
            None if router.name in self.silent else router.directory.answer(asker) for router in self.routers
        ]

    async def prefix_given_back(self, asker: str, pin_id: PinId, timeout_s: float) -> list[bool]:
        return [
            router.directory.hear_given_back(asker, pin_id)
            for router in self.routers
            if router.name not in self.silent
        ]

    async def prefixes_handed_on(self, asker: str, given_back: GivenBack, timeout_s: float) -> bool:
        for router in self.routers:
            if router.name not in self.silent:
                router.directory.hear_handed_on(asker, given_back)
        return not self.silent

    def called(self, name: ReplicaId) -> PaperReplica:
        """Raises ReplicaLost where the call does not get there."""
        if name not in self.replicas or name in self.deaf:
            raise ReplicaLost("it cannot be reached")
        return self.replicas[name]

    def check_answered(self, name: ReplicaId) -> None:
        """Raises ReplicaLost where what was done is not heard of."""
        if name in self.mute:
            raise ReplicaLost("its answer was lost")

    def holders(self, pin_id: str) -> list[ReplicaId]:
        return [name for name, replica in self.replicas.items() if pin_id in replica.pins]


class PaperRouter:
    """One Router's keeper on that fleet. `calls` of its own: who accepts is told to its own routing."""

    def __init__(self, fleet: PaperFleet) -> None:
        self.fleet = fleet
        self.name = f"router{fleet.num_routers}"
        fleet.num_routers += 1
        self.clock = fleet.clock
        settings = config(binding="at_once")
        self.routing = Routing(settings, clock=self.clock)
        self.routing.update_replicas({name: each.info for name, each in fleet.replicas.items()})
        for name in fleet.replicas:
            self.routing.on_load(name, load())
        metrics = RouterMetrics([], [])
        dispatcher = Dispatcher(settings, self.routing, self, BlockHasher(FINGERPRINT), metrics, self.clock)
        copies = Copies(self.routing, dispatcher, self)
        self.keeper = PrefixKeeper(
            self.routing,
            copies,
            self.engines,
            name=self.name,
            turn_of=fleet.turns.get,
            clock=self.clock,
            wall_clock=self.clock,
            max_seconds=MAX_SECONDS,
        )
        self.directory = PrefixDirectory(self.keeper)
        self.directory.others = fleet
        self.succession = Succession(self.keeper, copies, fleet.routers_up, hashes_of, self.clock)
        fleet.routers.append(self)

    def engines(self) -> dict[ReplicaId, EngineView]:
        return {
            name: EngineView(each, self.fleet.reports.get(name))
            for name, each in self.routing.replicas.items()
        }

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        name, lease = request.ranks[0], request.pin
        self.fleet.asked.append(name)
        self.fleet.requests.append(request)
        replica = self.fleet.called(name)
        self.routing.routed(request.request_id, name)
        if replica.gate is not None:
            await replica.gate.wait()
        if replica.script is not None:
            replica.script(request)
        blocks = len(request.token_ids) // BLOCK_SIZE
        assert lease is not None
        if blocks > replica.left:
            raise PinsFull(blocks, replica.left)
        replica.pins[lease.pin_id] = lease, blocks
        replica.tokens[lease.pin_id] = request.token_ids
        self.fleet.check_answered(name)
        yield Delta("", (), 0, FinishReason.LENGTH)

    async def unpin(self, request: ReleasePin) -> bool:
        self.fleet.released.append((request.pin_id, request.replica_id))
        has_held = self.fleet.called(request.replica_id).pins.pop(request.pin_id, None) is not None
        self.fleet.check_answered(request.replica_id)
        return has_held

    async def inherit(self, request: InheritPin) -> HeldPrefix | None:
        replica = self.fleet.called(request.replica_id)
        if request.pin_id not in replica.pins:
            return None
        lease, blocks = replica.pins[request.pin_id]
        if lease.keeper not in (request.keeper, request.heir):
            return None
        replica.pins[request.pin_id] = replace(lease, keeper=request.heir), blocks
        self.fleet.check_answered(request.replica_id)
        return HeldPrefix(replica.tokens[request.pin_id], lease.cache_salt)

    async def hold(self, num_blocks: int = 4, **changes: Any) -> str:
        """The id of a new pin."""
        options = {"owner": "alice", "copies": 2, "seconds": 60.0, "request_id": "r", **changes}
        pin, _ = await self.keeper.establish(a_prefix(num_blocks), **options)
        return pin.pin_id


def a_prefix(num_blocks: int, first: int = 0, salt: str = "") -> Prefix:
    tokens = array("i", range(first, first + num_blocks * BLOCK_SIZE))
    return Prefix(tokens, _hashes(tokens, salt), salt)


async def hashes_of(tokens: array[int], salt: str) -> PackedHashes:
    """What `Succession` needs."""
    return _hashes(tokens, salt)


def _hashes(tokens: array[int], salt: str) -> PackedHashes:
    hasher = BlockHasher(FINGERPRINT)
    return PackedHashes.of(hasher.chain(hasher.root(salt=salt), tokens))


def names(*indices: int) -> Sequence[ReplicaId]:
    return [ReplicaId(f"r{index}") for index in indices]


async def settle(router: PaperRouter) -> None:
    """Let replicas report, the Router look, and what it started come to its end."""
    router.fleet.tell()
    router.keeper.look()
    for _ in range(50):
        await asyncio.sleep(0)
    router.fleet.tell()


def hold_late(fleet: PaperFleet, request: GenerateRequest) -> None:
    """Its replica holds what it was asked for, whoever has given it up."""
    assert request.pin is not None
    replica = fleet.replicas[request.ranks[0]]
    replica.pins[request.pin.pin_id] = request.pin, 4
    replica.tokens[request.pin.pin_id] = request.token_ids
