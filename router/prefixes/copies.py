"""One replica made to hold a prefix, or to give it back.

A copy is made like a generation that ends when its prompt is computed: it is placed, waits its turn, shows in
the load and in the decisions. Knows the dispatcher and one target at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection
from typing import Protocol

from cache.errors import PinsFull, QueueFull, ServingError
from cache.messages import HeldPrefix, InheritPin, PinLease, ReleasePin, SamplingParams
from cache.types import PinId, ReplicaId, RequestId
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.job import Job
from router.errors import AllBusy, NoReplica, ReplicaLost
from router.placement.decision import RouteQuery
from router.placement.routing import Routing
from router.policies.expected_time import ExpectedTime
from router.prefixes.prefix import Prefix, Turn

# Whatever places the traffic: a copy goes where it is cheapest, and that counts what is already there.
POLICY = ExpectedTime.name
# What `make` raises where the replica has refused it, or was not asked: no copy comes of it, however late.
NOTHING_LEFT = (PinsFull, QueueFull, AllBusy)
ANSWER_TIMEOUT_S = 10.0  # an engine answers after the step it is in

logger = logging.getLogger(__name__)


class PinCalls(Protocol):
    """What one replica is asked of a pin that it holds. Both raise ReplicaLost or a RoutingError where it
    cannot be asked."""

    async def unpin(self, request: ReleasePin) -> bool:
        """Give it back; whether it held it."""

    async def inherit(self, request: InheritPin) -> HeldPrefix | None:
        """Have another Router keep it; what it is, or None where that one came too late."""


class Copies:
    """Makes and ends single copies. Owner: the router's event loop."""

    def __init__(self, routing: Routing, dispatcher: Dispatcher, calls: PinCalls) -> None:
        self._routing = routing
        self._dispatcher = dispatcher
        self._calls = calls

    def order(
        self, prefix: Prefix, turn: Turn, request_id: RequestId, candidates: Collection[ReplicaId]
    ) -> list[ReplicaId]:
        """The candidates that can take it now, cheapest first: those that hold most of it cost least.

        Books nothing. Raises NoReplica or AllBusy if none can.
        """
        decision = self._routing.weigh(self._query(prefix, turn, request_id, candidates))
        return list(decision.ranking.replica_ids(len(candidates)))

    async def make(
        self,
        prefix: Prefix,
        turn: Turn,
        lease: PinLease,
        target: ReplicaId,
        request_id: RequestId,
        timeout_s: float,
        *,
        is_again: bool,
    ) -> int:
        """Compute it there and have it held. Tokens that were cached already.

        is_again: it takes the place of one that was lost, and is not refused where newcomers are.
        Raises PinsFull, another RequestRefused, or a RoutingError. Then nothing is held there, but one that
        is not of NOTHING_LEFT may be wrong about that: its call was lost, and the replica goes on.
        """
        job = Job(
            request_id=request_id,
            prompt=prefix.token_ids,
            block_hashes=prefix.block_hashes,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            seed=0,
            cache_salt=prefix.cache_salt,
            tenant=turn.tenant,
            share=turn.share,
            priority=turn.priority,
            policy=POLICY,
            timeout_s=timeout_s,
            pin=lease,
            excluded=frozenset(self._routing.replicas) - {target},
            is_again=is_again,
        )
        generation = self._dispatcher.start(job)
        try:
            async with contextlib.aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    if delta.token_ids:
                        raise ReplicaLost("it generates where it was to hold")  # of another version
        except NOTHING_LEFT as error:
            if generation.num_attempts > 1:
                known = len(self._routing.replicas)
                raise NoReplica(known, known) from error  # an earlier attempt may go on there
            raise
        if generation.replica_id != target:
            # It joined after the target was chosen, and Serve took it: what it holds is not what was wanted.
            await self.end(lease.pin_id, generation.replica_id)
            raise ReplicaLost("another replica took it")
        return generation.cached_tokens or 0

    async def end(self, pin_id: PinId, replica_id: ReplicaId | None) -> None:
        """Have it given back. A replica that cannot be asked, or is gone, is left to its next report
        (`tombstones.py`)."""
        if replica_id is None or replica_id not in self._routing.replicas:
            return
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._calls.unpin(ReleasePin(pin_id, replica_id))
        except (ServingError, TimeoutError) as error:
            fields = {"pin_id": pin_id, "replica_id": replica_id, "error_type": type(error).__name__}
            logger.warning("a pin could not be released until its replica tells of it again", extra=fields)

    async def inherit(
        self, pin_id: PinId, replica_id: ReplicaId, *, keeper: str, heir: str
    ) -> HeldPrefix | None:
        """Have `heir` keep in place of `keeper` what is held there; what that is.

        None: it is not held, somebody else was quicker, or the replica cannot be asked.
        """
        if replica_id not in self._routing.replicas:
            return None
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await self._calls.inherit(InheritPin(pin_id, replica_id, keeper, heir))
        except (ServingError, TimeoutError) as error:
            fields = {"pin_id": pin_id, "replica_id": replica_id, "error_type": type(error).__name__}
            logger.warning("a pin could not be taken over", extra=fields)
            return None

    def _query(
        self, prefix: Prefix, turn: Turn, request_id: RequestId, candidates: Collection[ReplicaId]
    ) -> RouteQuery:
        return RouteQuery(
            request_id=request_id,
            block_hashes=prefix.block_hashes,
            num_prompt_tokens=len(prefix.token_ids),
            excluded=frozenset(self._routing.replicas) - frozenset(candidates),
            policy=POLICY,
            max_tokens=1,
            cache_salt=prefix.cache_salt,
            tenant=turn.tenant,
            share=turn.share,
            priority=turn.priority,
        )
