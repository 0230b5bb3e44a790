"""Prompts that were sent to replicas and have no first token yet: what of them goes before a newcomer.

An engine serves tenants by turns (`cache/tenant_shares.py`): what others have queued there is before a
request only as far as it is their turn before it is computed. By start-time fair queueing's tags:

    of another tenant's tokens there, before it   min(those, (tag + own tokens / share - its tag) * its share)

Of its own tenant's all is before it, or, where a prompt that has begun stands back for a shorter one
(`cache/scheduling_order.py`), what has an earlier place in the engine's order. That is behind whoever is yet
to compute what it is to find cached: a twin is not short before its twin is there.

Knows replicas, tenants, tokens, places and whose blocks are expected; knows no caches. Other Routers' prompts
are taken to be alike.
Owner: the router's event loop.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from cache.messages import ReplicaInfo
from cache.scheduling_order import SchedulingOrder
from cache.types import HashHint, ReplicaId, RequestId
from router.placement.decision import DecisionRecord, RouteQuery
from router.pricing.cost import prefill_s

LAST = math.inf  # a place behind everybody's

# Whether a replica holds a block of a prompt, by its index, and is not only expected to.
IsThere = Callable[[ReplicaId, Sequence[HashHint], int], bool]


class _Sent(NamedTuple):
    replica_id: ReplicaId
    tenant: str
    tokens: int
    place: float
    lag: float  # of its priority, in `place`
    hints: Sequence[HashHint]  # of its full blocks


class _Queued:
    """A tenant's at one replica, in the engine's order."""

    __slots__ = ("_places", "_sizes", "share", "tokens")

    def __init__(self) -> None:
        self.share, self.tokens = 1.0, 0
        self._places: list[float] = []
        self._sizes: list[int] = []  # tokens, of the prompt at each of these places

    def __len__(self) -> int:
        """Prompts."""
        return len(self._places)

    @property
    def last(self) -> float:
        """Of all places, the one behind the others."""
        return self._places[-1]

    def add(self, sent: _Sent) -> None:
        index = bisect_right(self._places, sent.place)
        self._places.insert(index, sent.place)
        self._sizes.insert(index, sent.tokens)
        self.tokens += sent.tokens

    def remove(self, sent: _Sent) -> None:
        index = self._sizes.index(sent.tokens, bisect_left(self._places, sent.place))
        del self._places[index], self._sizes[index]
        self.tokens -= sent.tokens

    def before(self, place: float) -> int:
        """Tokens. O(prompts before it), or O(1) for the last place."""
        return self.tokens if place == LAST else self.split(place)[0]

    def split(self, place: float) -> tuple[int, int]:
        """Tokens before it, and prompts behind. O(prompts before it)."""
        index = bisect_right(self._places, place)
        return sum(self._sizes[:index]), len(self._places) - index


class SentPrompts:
    """Told of each decision, of who took it, and of when it waits no more."""

    def __init__(self, block_size: int, is_there: IsThere) -> None:
        self._block_size = block_size
        self._is_there = is_there
        self._by_id: dict[RequestId, _Sent] = {}
        self._at: dict[ReplicaId, dict[RequestId, _Sent]] = {}  # those, first come first; none without any
        self._queued: dict[ReplicaId, dict[str, _Queued]] = {}  # none without a token
        self._preempting: dict[ReplicaId, SchedulingOrder] = {}  # of the engines where prompts stand back

    def __len__(self) -> int:
        return len(self._by_id)

    def may_stand_back(self, tenants: Set[str]) -> bool:
        """Whether any of them might let a request of one of these tenants by. O(replicas)."""
        if not self._preempting.keys().isdisjoint(self._queued):
            return True
        return any([len(queued) > 1 or queued.keys() != tenants for queued in self._queued.values()])

    def last_place(self, replica_id: ReplicaId, tenant: str) -> float:
        """Whoever's place there is behind it lets nobody stand back. O(1).

        Of that tenant's prompts; `LAST` where others wait, too, whose turns places do not tell.
        """
        queued = self._queued.get(replica_id)
        if queued is None or replica_id not in self._preempting:
            return -math.inf
        own = queued.get(tenant)
        return own.last if own is not None and len(queued) == 1 else LAST

    def place(self, replica_id: ReplicaId, query: RouteQuery, own_s: float, now: float) -> float:
        """Of a request that comes to that replica now, among its tenant's. own_s: of its prefill there."""
        order = self._preempting.get(replica_id)
        if order is None:
            return LAST
        came_s = now if query.asked_at is None else query.asked_at
        return order.place(own_s, came_s=came_s, now_s=now) + order.lag(query.priority)

    def promised_place(
        self, replica_id: ReplicaId, query: RouteQuery, hints: Sequence[HashHint], cached: int
    ) -> float:
        """Of whoever is yet to compute there the last of so many tokens of that prompt, which it is to find
        cached: it comes after that one. -inf: they are there. O(prompts there).

        hints: of its full blocks.
        """
        order, there = self._preempting.get(replica_id), self._at.get(replica_id)
        last = cached // self._block_size - 1
        if order is None or there is None or last < 0:
            return -math.inf
        name = hints[last]  # of the whole prefix
        for sent in there.values():
            if len(sent.hints) > last and sent.hints[last] == name:
                if self._is_there(replica_id, hints, last):
                    break
                # For whoever is less urgent it does not wait: it computes the prefix itself.
                return sent.place - sent.lag + order.lag(query.priority)
        return -math.inf

    def before(
        self,
        replica_id: ReplicaId,
        tenant: str,
        num_tokens: int,
        share: float,
        tag: Callable[[str], float],
        place: float = LAST,
    ) -> float:
        """Of what is queued there, the part that is computed before so many tokens of that tenant; 0 to 1.

        tag: what a tenant has had, for its share. place: as `place` has it. O(tenants there, and prompts of
        this one).
        """
        queued = self._queued.get(replica_id)
        if queued is None or (place == LAST and tenant in queued and len(queued) == 1):
            return 1.0
        done_at = tag(tenant) + num_tokens / share
        total = before = 0.0
        for name, of in queued.items():
            total += of.tokens
            turn = of.before(place) if name == tenant else (done_at - tag(name)) * of.share
            before += min(max(0.0, turn), of.tokens)
        return before / total

    def met(
        self,
        replica_id: ReplicaId,
        tenant: str,
        num_tokens: int,
        share: float,
        place: float,
        num_waiting: int,
    ) -> tuple[float, float]:
        """Of what is queued there, the part before so many tokens of that tenant, as `before` has it; and how
        many prompts, of its tenant, are behind them. Something is queued there.

        What tenants have had the engines know: here nobody has had more than another. num_waiting: prompts
        there of all Routers, and of all tenants. O(tenants there, and prompts before it).
        """
        queued = self._queued[replica_id]
        own = queued.get(tenant)
        if own is not None and len(queued) == 1:
            num_tokens_before, num_behind = own.split(place)
            return num_tokens_before / own.tokens, num_behind * max(1.0, num_waiting / len(own))
        part = self.before(replica_id, tenant, num_tokens, share, _alike, place)
        num_behind = own.split(place)[1] if own is not None else 0
        return part, num_behind * max(1.0, num_waiting / sum(map(len, queued.values())))

    # --- what becomes of them -----------------------------------------------------------------

    def decided(self, record: DecisionRecord, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        """It waits at the one chosen, and nowhere else any more. O(prompts there)."""
        self.over(query.request_id)
        replica_id, price = record.replica_id, record.ranking.best.price
        total, cached = record.shape.num_prompt_tokens, record.cached_tokens
        own_s = 0.0 if price is None else prefill_s(price, total, cached)
        place = self.place(replica_id, query, own_s, record.decided_at)
        place = max(place, self.promised_place(replica_id, query, hints, cached))
        order = self._preempting.get(replica_id)
        lag = order.lag(query.priority) if order is not None else 0.0
        sent = _Sent(replica_id, query.tenant, total - cached, place, lag, hints)
        self._add(query.request_id, sent, query.share)

    def moved(self, request_id: RequestId, replica_id: ReplicaId) -> None:
        """Another replica has taken it, and is taken to have as much of it to compute. Nothing if it does not
        wait."""
        sent = self._by_id.get(request_id)
        if sent is not None and sent.replica_id != replica_id:
            share = self._queued[sent.replica_id][sent.tenant].share
            self.over(request_id)
            self._add(request_id, sent._replace(replica_id=replica_id), share)

    def over(self, request_id: RequestId) -> None:
        """It waits for no first token any more, or for that of no replica that is known. Idempotent."""
        sent = self._by_id.pop(request_id, None)
        if sent is None:
            return
        there = self._at[sent.replica_id]
        del there[request_id]
        if not there:
            del self._at[sent.replica_id]
        queued = self._queued[sent.replica_id]
        of = queued[sent.tenant]
        of.remove(sent)
        if not of:
            del queued[sent.tenant]
            if not queued:
                del self._queued[sent.replica_id]

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        if info.scheduling_order.preempts:
            self._preempting[replica_id] = info.scheduling_order

    def replica_removed(self, replica_id: ReplicaId) -> None:
        """O(those that wait there)."""
        self._queued.pop(replica_id, None)
        self._preempting.pop(replica_id, None)
        for request_id in self._at.pop(replica_id, ()):
            del self._by_id[request_id]

    def _add(self, request_id: RequestId, sent: _Sent, share: float) -> None:
        self._by_id[request_id] = sent
        self._at.setdefault(sent.replica_id, {})[request_id] = sent
        of = self._queued.setdefault(sent.replica_id, {}).setdefault(sent.tenant, _Queued())
        of.share = share
        of.add(sent)


def _alike(tenant: str) -> float:
    return 0.0
