"""What waits at one replica for its first token: whose, how much of it, and in which order.

Its engine says what it has queued (`Load.queued`); what this Router has sent there and the engine has not
named yet stays on top of that.

An engine serves tenants by turns (`cache/tenant_shares.py`): what others have queued there is before a
request only as far as it is their turn before it is computed. Of its own tenant's all is before it, or, where
a prompt that has begun stands back for a shorter one (`cache/scheduling_order.py`), what has an earlier place
in the engine's order. Of another tenant's, by start-time fair queueing's tags, which the engine tells, too:

    min(those, (had + (own tokens, and those before it) / share - what that one has had) * that one's share)

Knows tenants, tokens and places; knows neither caches nor other replicas. Owner: the router's event loop.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cache.events import QueuedPrompts
from cache.scheduling_order import SchedulingOrder
from cache.types import HashHint, ReplicaId, RequestId
from router.placement.decision import RouteQuery

LAST = math.inf  # a place behind everybody's

# Tokens, for its share, that a tenant has had beyond what a newcomer begins with.
Had = Callable[[str], float]


def newcomers(tenant: str) -> float:
    """Nobody has had more than another."""
    return 0.0


class Sent(NamedTuple):
    """A request of this Router that waits there."""

    replica_id: ReplicaId
    tenant: str
    share: float
    tokens: int
    place: float
    lag: float  # of its priority, in `place`
    hints: Sequence[HashHint]  # of its full blocks
    named_by: ReplicaId | None = None  # whose engine counts it in what it says of its queue


class Line:
    """A tenant's, in the engine's order: as that has told it, and those it has not named."""

    __slots__ = ("had", "last", "num_prompts", "places", "share", "sizes", "tokens", "told", "told_at")

    def __init__(self, share: float) -> None:
        self.share = share
        self.had: float | None = None  # None: its engine has not told of it
        self.tokens = self.num_prompts = 0  # of both
        self.last = -math.inf  # of all places that are known, the one behind the others
        self.told: QueuedPrompts | None = None
        self.told_at = 0.0  # what is to be added to its places
        self.places: list[float] = []  # of those that it has not named
        self.sizes: list[int] = []  # tokens, of the prompt at each of these places

    def tell(self, told: QueuedPrompts | None, told_at: float) -> None:
        """The engine's account, in place of its last one. None: it has nothing of this tenant's."""
        self.told, self.told_at = told, told_at
        self.tokens, self.num_prompts = sum(self.sizes), len(self.sizes)
        if told is not None:
            self.share, self.had = told.share, told.had
            self.tokens += sum(told.tokens) + told.more_tokens
            self.num_prompts += len(told.tokens) + told.num_more
        self._find_last()

    def add(self, sent: Sent) -> None:
        index = bisect_right(self.places, sent.place)
        self.places.insert(index, sent.place)
        self.sizes.insert(index, sent.tokens)
        self.tokens += sent.tokens
        self.num_prompts += 1
        self._find_last()

    def remove(self, sent: Sent) -> None:
        index = self.sizes.index(sent.tokens, bisect_left(self.places, sent.place))
        del self.places[index], self.sizes[index]
        self.tokens -= sent.tokens
        self.num_prompts -= 1
        self._find_last()

    def before(self, place: float) -> int:
        """Tokens. O(prompts before it), or O(1) for the last place."""
        return self.tokens if place == LAST else self.split(place)[0]

    def split(self, place: float) -> tuple[int, int]:
        """Tokens before it, and prompts behind. O(prompts before it)."""
        told, tokens, num_behind = self.told, 0, 0
        if self.places:
            index = bisect_right(self.places, place)
            tokens, num_behind = sum(self.sizes[:index]), len(self.places) - index
        if told is None:
            return tokens, num_behind
        index = bisect_right(told.places, place - self.told_at)
        if index == len(told.places):  # whose places are not told may be before it, too
            return tokens + sum(told.tokens) + told.more_tokens, num_behind
        return tokens + sum(told.tokens[:index]), num_behind + len(told.places) - index + told.num_more

    def _find_last(self) -> None:
        told, last = self.told, self.places[-1] if self.places else -math.inf
        self.last = max(last, told.places[-1] + self.told_at) if told is not None and told.places else last


class ReplicaQueue:
    """Of one replica, as its engine has told it, and with what that has not named."""

    __slots__ = ("lines", "order", "preempts", "sent", "since")

    def __init__(self, order: SchedulingOrder) -> None:
        self.order = order
        self.preempts = order.preempts  # every decision asks every replica, and an enumeration takes its time
        self.lines: dict[str, Line] = {}  # by tenant; none without a prompt
        self.sent: dict[RequestId, Sent] = {}  # this Router's, first come first
        self.since = 0.0  # when it was as it is told, and what is first in it was begun

    def last_place(self, tenant: str) -> float:
        """Where prompts stand back: whoever's place is behind it lets nobody do so. O(1).

        Of that tenant's prompts; `LAST` where others wait, too, whose turns places do not tell.
        """
        own = self.lines.get(tenant)
        return LAST if own is None or len(self.lines) > 1 else own.last

    def place(self, query: RouteQuery, own_s: float, now: float) -> float:
        """Of a request that comes now, among its tenant's. own_s: of its prefill here."""
        if not self.preempts:
            return LAST
        came_s = now if query.asked_at is None else query.asked_at
        return self.order.place(own_s, came_s=came_s, now_s=now) + self.order.lag(query.priority)

    def lag(self, priority: int) -> float:
        """What its priority adds to its place."""
        return self.order.lag(priority) if self.preempts else 0.0

    def part_before(self, tenant: str, num_tokens: int, share: float, place: float, had: Had) -> float:
        """Of what is queued, the part that is computed before so many tokens of that tenant; 0 to 1, and 1 of
        nothing.

        had: of tenants of which the engine has not told. O(tenants, and prompts of this one).
        """
        own = self.lines.get(tenant)
        tokens = own.before(place) if own is not None else 0
        return self._part(own, tenant, tokens, num_tokens, share, had)

    def met(self, tenant: str, num_tokens: int, share: float, place: float) -> tuple[float, int]:
        """That part, and how many prompts of its tenant are behind it."""
        own = self.lines.get(tenant)
        tokens, num_behind = own.split(place) if own is not None else (0, 0)
        return self._part(own, tenant, tokens, num_tokens, share, newcomers), num_behind

    def _part(
        self, own: Line | None, tenant: str, before: int, num_tokens: int, share: float, had: Had
    ) -> float:
        """own: its tenant's, of which so many tokens are before it."""
        lines = self.lines
        if own is not None and len(lines) == 1:
            return before / own.tokens if own.tokens else 1.0
        own_had = own.had if own is not None and own.had is not None else had(tenant)
        done_at = own_had + (before + num_tokens) / share
        total, others = 0, 0.0
        for name, of in lines.items():
            total += of.tokens
            if name != tenant:
                begins_at = of.had if of.had is not None else had(name)
                others += min(max(0.0, (done_at - begins_at) * of.share), of.tokens)
        return (before + others) / total if total else 1.0

    def before_s(self, part: float, busy_until: float, now: float) -> float:
        """Seconds that this part of what was queued takes from now on: what goes first is worked on first.

        busy_until: when all of it will be done.
        """
        left_s = part * (busy_until - self.since) - (now - self.since)
        return left_s if left_s > 0.0 else 0.0

    # --- what becomes of it -------------------------------------------------------------------

    def told(self, accounts: Mapping[str, QueuedPrompts], now: float) -> None:
        """The engine's account, by tenant, in place of its last one. O(tenants, and what it names)."""
        self.since = now
        told_at = self.order.place(0.0, came_s=now, now_s=now)
        for tenant, account in accounts.items():
            if tenant not in self.lines:
                self.lines[tenant] = Line(account.share)
        for tenant, line in list(self.lines.items()):
            line.tell(accounts.get(tenant), told_at)
            if not line.num_prompts:
                del self.lines[tenant]

    def add(self, sent: Sent, now: float) -> None:
        """One that its engine has not named."""
        if not self.lines:
            self.since = now
        line = self.lines.get(sent.tenant)
        if line is None:
            line = self.lines[sent.tenant] = Line(sent.share)
        line.share = sent.share
        line.add(sent)

    def remove(self, sent: Sent) -> None:
        """One that was added: it is named by now, or waits no more."""
        line = self.lines[sent.tenant]
        line.remove(sent)
        if not line.num_prompts:
            del self.lines[sent.tenant]
