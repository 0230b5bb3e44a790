"""Prompts that wait at replicas for their first token: what of them goes before a newcomer.

Engines say whose prompts they have queued, and in which order they compute them (`Load.queued`), whichever
Router sent them; what this Router has sent and the engine has not named yet stays on top of that, as in its
load (`pricing/replica_load.py`).

An engine serves tenants by turns (`cache/tenant_shares.py`): what others have queued there is before a
request only as far as it is their turn before it is computed. Of its own tenant's all is before it, or, where
a prompt that has begun stands back for a shorter one (`cache/scheduling_order.py`), what has an earlier place
in the engine's order. Of another tenant's, by start-time fair queueing's tags, which the engine tells, too:

    min(those, (had + (own tokens, and those before it) / share - what that one has had) * that one's share)

A request's place is behind whoever is yet to compute what it is to find cached: a twin is not short before
its twin is there.

Knows replicas, tenants, tokens, places and whose blocks are expected; knows no caches.
Owner: the router's event loop.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from cache.events import Load, QueuedPrompts
from cache.messages import ReplicaInfo
from cache.scheduling_order import SchedulingOrder
from cache.types import HashHint, ReplicaId, RequestId
from router.placement.decision import DecisionRecord, RouteQuery
from router.pricing.cost import prefill_s

LAST = math.inf  # a place behind everybody's

# Whether a replica holds a block of a prompt, by its index, and is not only expected to.
IsThere = Callable[[ReplicaId, Sequence[HashHint], int], bool]

# Tokens, for its share, that a tenant has had beyond what a newcomer begins with.
Had = Callable[[str], float]


def newcomers(tenant: str) -> float:
    """Nobody has had more than another."""
    return 0.0


class _Sent(NamedTuple):
    replica_id: ReplicaId
    tenant: str
    share: float
    tokens: int
    place: float
    lag: float  # of its priority, in `place`
    hints: Sequence[HashHint]  # of its full blocks
    named_by: ReplicaId | None = None  # whose engine counts it in what it says of its queue


class _Line:
    """A tenant's at one replica, in the engine's order: as that has told it, and those it has not named."""

    __slots__ = ("_places", "_sizes", "_told", "_told_at", "had", "num_prompts", "share", "tokens")

    def __init__(self, share: float) -> None:
        self.share = share
        self.had: float | None = None  # None: its engine has not told of it
        self.tokens = self.num_prompts = 0  # of both
        self._told: QueuedPrompts | None = None
        self._told_at = 0.0  # what is to be added to its places
        self._places: list[float] = []  # of those that it has not named
        self._sizes: list[int] = []  # tokens, of the prompt at each of these places

    @property
    def last(self) -> float:
        """Of all places that are known, the one behind the others."""
        told = self._told
        last = told.places[-1] + self._told_at if told is not None and told.places else -math.inf
        return max(last, self._places[-1]) if self._places else last

    def tell(self, told: QueuedPrompts | None, told_at: float) -> None:
        """The engine's account, in place of its last one. None: it has nothing of this tenant's."""
        self._told, self._told_at = told, told_at
        self.tokens, self.num_prompts = sum(self._sizes), len(self._sizes)
        if told is not None:
            self.share, self.had = told.share, told.had
            self.tokens += sum(told.tokens) + told.more_tokens
            self.num_prompts += len(told.tokens) + told.num_more

    def add(self, sent: _Sent) -> None:
        index = bisect_right(self._places, sent.place)
        self._places.insert(index, sent.place)
        self._sizes.insert(index, sent.tokens)
        self.tokens += sent.tokens
        self.num_prompts += 1

    def remove(self, sent: _Sent) -> None:
        index = self._sizes.index(sent.tokens, bisect_left(self._places, sent.place))
        del self._places[index], self._sizes[index]
        self.tokens -= sent.tokens
        self.num_prompts -= 1

    def before(self, place: float) -> int:
        """Tokens. O(prompts before it), or O(1) for the last place."""
        return self.tokens if place == LAST else self.split(place)[0]

    def split(self, place: float) -> tuple[int, int]:
        """Tokens before it, and prompts behind. O(prompts before it)."""
        told, index = self._told, bisect_right(self._places, place)
        tokens, num_behind = sum(self._sizes[:index]), len(self._places) - index
        if told is None:
            return tokens, num_behind
        index = bisect_right(told.places, place - self._told_at)
        if index == len(told.places):  # whose places are not told may be before it, too
            return tokens + sum(told.tokens) + told.more_tokens, num_behind
        return tokens + sum(told.tokens[:index]), num_behind + len(told.places) - index + told.num_more


class ReplicaQueues:
    """Told of each decision, of who took it, of when it waits no more, and of what engines say."""

    def __init__(self, block_size: int, is_there: IsThere) -> None:
        self._block_size = block_size
        self._is_there = is_there
        self._by_id: dict[RequestId, _Sent] = {}
        self._at: dict[ReplicaId, dict[RequestId, _Sent]] = {}  # those, first come first; none without any
        self._lines: dict[ReplicaId, dict[str, _Line]] = {}  # by tenant; none without a prompt
        self._since: dict[ReplicaId, float] = {}  # when that was so, and what is first there was begun
        self._orders: dict[ReplicaId, SchedulingOrder] = {}
        self._preempting: dict[ReplicaId, SchedulingOrder] = {}  # of the engines where prompts stand back

    def __len__(self) -> int:
        """Requests of this Router that wait for their first token."""
        return len(self._by_id)

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits anywhere, as far as is known."""
        return not self._lines

    def may_stand_back(self, tenants: Set[str]) -> bool:
        """Whether any of them might let a request of one of these tenants by. O(replicas)."""
        if not self._preempting.keys().isdisjoint(self._lines):
            return True
        return any([len(lines) > 1 or lines.keys() != tenants for lines in self._lines.values()])

    def last_place(self, replica_id: ReplicaId, tenant: str) -> float:
        """Whoever's place there is behind it lets nobody stand back. O(1).

        Of that tenant's prompts; `LAST` where others wait, too, whose turns places do not tell.
        """
        lines = self._lines.get(replica_id)
        if lines is None or replica_id not in self._preempting:
            return -math.inf
        own = lines.get(tenant)
        return own.last if own is not None and len(lines) == 1 else LAST

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
        cached: it comes after that one. -inf: they are there. O(this Router's prompts there).

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
        place: float = LAST,
        had: Had = newcomers,
    ) -> float:
        """Of what was queued there when it was last heard of, the part that is computed before so many tokens
        of that tenant; 0 to 1.

        place: as `place` has it. had: over all replicas; of tenants of which this one's engine has not told,
        it is taken to have served as much as the others. O(tenants there, and prompts of this one).
        """
        own = self._lines.get(replica_id, {}).get(tenant)
        tokens = own.before(place) if own is not None else 0
        return self._part(replica_id, tenant, tokens, num_tokens, share, had)

    def met(
        self, replica_id: ReplicaId, tenant: str, num_tokens: int, share: float, place: float
    ) -> tuple[float, int]:
        """That part, and how many prompts of its tenant are behind it there."""
        own = self._lines.get(replica_id, {}).get(tenant)
        tokens, num_behind = own.split(place) if own is not None else (0, 0)
        return self._part(replica_id, tenant, tokens, num_tokens, share, newcomers), num_behind

    def _part(
        self, replica_id: ReplicaId, tenant: str, before: int, num_tokens: int, share: float, had: Had
    ) -> float:
        """before: tokens of its own tenant that are."""
        lines = self._lines.get(replica_id)
        if lines is None:
            return 1.0
        own = lines.get(tenant)
        if own is not None and len(lines) == 1:
            return before / own.tokens if own.tokens else 1.0
        own_had = own.had if own is not None and own.had is not None else had(tenant) / len(self._orders)
        done_at = own_had + (before + num_tokens) / share
        total, others = 0, 0.0
        for name, of in lines.items():
            total += of.tokens
            if name != tenant:
                begins_at = of.had if of.had is not None else had(name) / len(self._orders)
                others += min(max(0.0, (done_at - begins_at) * of.share), of.tokens)
        return (before + others) / total if total else 1.0

    def before_s(self, replica_id: ReplicaId, part: float, busy_until: float, now: float) -> float:
        """Seconds that this part of what was queued there takes from now on: what goes first is worked on
        first. busy_until: when all of it will be done."""
        since = self._since.get(replica_id, now)
        return max(0.0, part * (busy_until - since) - (now - since))

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
        sent = _Sent(replica_id, query.tenant, query.share, total - cached, place, lag, hints)
        self._enter(query.request_id, sent, record.decided_at)

    def moved(self, request_id: RequestId, replica_id: ReplicaId, now: float) -> None:
        """Another replica has taken it, and is taken to have as much of it to compute. Nothing if it does not
        wait."""
        sent = self._by_id.get(request_id)
        if sent is not None and sent.replica_id != replica_id:
            self.over(request_id)
            named_by = replica_id if sent.named_by == replica_id else None
            self._enter(request_id, sent._replace(replica_id=replica_id, named_by=named_by), now)

    def over(self, request_id: RequestId) -> None:
        """It waits for no first token any more, or for that of no replica that is known. Idempotent."""
        sent = self._by_id.pop(request_id, None)
        if sent is None:
            return
        there = self._at[sent.replica_id]
        del there[request_id]
        if not there:
            del self._at[sent.replica_id]
        if sent.named_by is None:
            self._leave_line(sent)

    def said(self, replica_id: ReplicaId, load: Load, now: float) -> None:
        """That engine's account of its queue, in place of its last one. O(tenants, and what it names)."""
        for request_id in load.admitted:
            sent = self._by_id.get(request_id)  # None: another Router's, or it waits no more
            if sent is not None and sent.named_by != replica_id:
                if sent.named_by is None:
                    self._leave_line(sent)
                named = sent._replace(named_by=replica_id)
                self._by_id[request_id] = self._at[sent.replica_id][request_id] = named
        lines = self._lines.get(replica_id)
        if lines is None and not load.queued:
            return
        self._since[replica_id] = now
        told_at = self._orders[replica_id].place(0.0, came_s=now, now_s=now)
        if lines is None:
            lines = self._lines[replica_id] = {}
        told = {of.tenant: of for of in load.queued}
        for tenant, of in told.items():
            if tenant not in lines:
                lines[tenant] = _Line(of.share)
        for tenant, line in list(lines.items()):
            line.tell(told.get(tenant), told_at)
            if not line.num_prompts:
                del lines[tenant]
        if not lines:
            del self._lines[replica_id]

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self._orders[replica_id] = info.scheduling_order
        if info.scheduling_order.preempts:
            self._preempting[replica_id] = info.scheduling_order

    def replica_removed(self, replica_id: ReplicaId) -> None:
        """O(those that wait there)."""
        self._lines.pop(replica_id, None)
        self._since.pop(replica_id, None)
        self._orders.pop(replica_id, None)
        self._preempting.pop(replica_id, None)
        for request_id in self._at.pop(replica_id, ()):
            del self._by_id[request_id]

    def _enter(self, request_id: RequestId, sent: _Sent, now: float) -> None:
        self._by_id[request_id] = sent
        self._at.setdefault(sent.replica_id, {})[request_id] = sent
        if sent.named_by is None:
            if sent.replica_id not in self._lines:
                self._since[sent.replica_id] = now
            lines = self._lines.setdefault(sent.replica_id, {})
            line = lines.setdefault(sent.tenant, _Line(sent.share))
            line.share = sent.share
            line.add(sent)

    def _leave_line(self, sent: _Sent) -> None:
        lines = self._lines[sent.replica_id]
        line = lines[sent.tenant]
        line.remove(sent)
        if not line.num_prompts:
            del lines[sent.tenant]
            if not lines:
                del self._lines[sent.replica_id]
