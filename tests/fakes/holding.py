"""Replicas of a Router under test that hold prefixes when they are asked to."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace

from cache.engine_report import HeldPin
from cache.errors import PinsFull
from cache.messages import Delta, FinishReason, GenerateRequest, ReleasePin
from cache.types import PinId, ReplicaId
from router.events.subscriber import EventStatistics
from tests.fakes.http import BLOCK_SIZE, RouterUnderTest
from tests.fakes.reports import an_engine_report


class HoldingReplicas:
    """What the replicas of a Router under test would hold, told as their reports would."""

    def __init__(self, router: RouterUnderTest, max_pinned: int = 100) -> None:
        self._router = router
        self._max_pinned = max_pinned
        self._number = 0
        self.pins: dict[tuple[ReplicaId, PinId], HeldPin] = {}
        self.salts: list[str] = []
        router.follow(self.hold)
        router.calls.unpin = self.unpin  # type: ignore[method-assign]
        router.parts.subscribers.statistics = self.statistics  # type: ignore[method-assign]

    async def hold(self, request: GenerateRequest, replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        lease, blocks = request.pin, len(request.token_ids) // BLOCK_SIZE
        assert lease is not None
        assert request.sampling.max_tokens == 1
        self.salts.append(request.cache_salt)
        if blocks > self._max_pinned:
            raise PinsFull(blocks, self._max_pinned)
        self.pins[replica, lease.pin_id] = HeldPin(
            *(lease.pin_id, lease.owner, blocks, lease.copies),
            *(lease.created_at, lease.expires_at, lease.keeper),
        )
        yield Delta("", (), 0, FinishReason.LENGTH)

    async def unpin(self, request: ReleasePin) -> bool:
        return self.pins.pop((request.replica_id, request.pin_id), None) is not None

    def statistics(self) -> EventStatistics:
        self._number += 1
        reports = {
            name: an_engine_report(
                number=self._number,
                max_pinned_blocks=self._max_pinned,
                pins=tuple(pin for (holder, _), pin in self.pins.items() if holder == name),
            )
            for name in self._router.replicas
        }
        return SimpleNamespace(reports=reports)  # type: ignore[return-value]
