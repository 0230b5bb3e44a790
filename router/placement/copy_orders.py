"""Copies of hot prefixes that decisions want, ordered from whoever makes them.

Nobody waits for a copy, so one that cannot be made is not made: where there is no room now, and where one of
the same prefix has failed a moment ago. Knows decisions and bookings; sends nothing.
Owner: the router's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cache.messages import ReplicaInfo
from cache.types import BlockHash, ReplicaId, RequestId
from router.errors import AllBusy, NoReplica
from router.placement.booking import Bookings
from router.placement.decision import HotCopy, Placement, RouteQuery
from router.placement.weighing import Weighing

CopyMaker = Callable[[RouteQuery, Placement], None]
"""Is told of a copy, booked already under its request id. Must release that, and not block."""

# A prefix stays as hot after a copy of it has failed, and each request with it would have it made again.
BARRED_S = 30.0


class CopyOrders:
    """Of one router."""

    def __init__(
        self,
        clock: Callable[[], float],
        block_size: int,
        weighing: Weighing,
        bookings: Bookings,
        members: Mapping[ReplicaId, ReplicaInfo],
    ) -> None:
        self._clock = clock
        self._block_size = block_size
        self._weighing = weighing
        self._bookings = bookings
        self._members = members
        self._maker: CopyMaker | None = None
        self._num_ordered = 0
        self._barred_until: dict[tuple[ReplicaId, BlockHash], float] = {}  # by the prefix's last block

    def made_by(self, maker: CopyMaker | None) -> None:
        """From now on decisions want copies, and `maker` is told of each; None: they want none."""
        self._maker = maker
        self._weighing.makes_copies = maker is not None

    def order(self, query: RouteQuery, copy: HotCopy) -> None:
        """query: of the request that was to make it. The copy has its salt and its tenant's turn, but goes
        before nobody that is no more urgent than usual."""
        now, prefix = self._clock(), query.block_hashes[: copy.num_tokens // self._block_size]
        self._barred_until = {each: until for each, until in self._barred_until.items() if until > now}
        if self._maker is None or (copy.replica_id, prefix[-1]) in self._barred_until:
            return
        self._num_ordered += 1
        wanted = RouteQuery(
            request_id=RequestId(f"{query.request_id}-copy-{self._num_ordered}"),
            block_hashes=prefix,
            num_prompt_tokens=copy.num_tokens,
            excluded=frozenset(self._members) - {copy.replica_id},
            policy=query.policy,
            max_tokens=1,
            token_ids=None if query.token_ids is None else query.token_ids[: copy.num_tokens],
            cache_salt=query.cache_salt,
            tenant=query.tenant,
            share=query.share,
            priority=max(0, query.priority),
            is_again=True,
        )
        try:
            decision = self._weighing.weigh(wanted)
        except (AllBusy, NoReplica):
            return
        self._maker(wanted, self._bookings.book_copy(decision))

    def failed(self, query: RouteQuery, replica_id: ReplicaId) -> None:
        """A copy was not made there."""
        self._barred_until[replica_id, query.block_hashes[-1]] = self._clock() + BARRED_S
