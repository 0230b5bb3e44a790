"""Those that a router holds, in the orders that are asked of them: whose turn it is, by age, by deadline.

Of one tenant it is the law's order that counts (`held.py`). Where several have requests here, first the one
that has had least for its share (`cache/tenant_shares.py`), then its requests in their order: so a tenant
that asks for more than its share makes its own requests wait, and no other's.
Knows places, times and whose requests they are; knows neither replicas nor what is decided. Owner: the
router's event loop.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from cache.tenant_shares import TenantShares
from cache.types import RequestId
from router.placement.held_request import HeldRequest

# Tokens that a tenant may have kept of what it did not use: as many as an engine of 512 tokens a step allows.
CREDIT_TOKENS = 32 * 512


@dataclass(slots=True)
class _Line:
    """One tenant's; each list sorted by what its name says."""

    share: float
    in_order: list[HeldRequest] = field(default_factory=list)
    by_age: list[HeldRequest] = field(default_factory=list)
    priorities: Counter[int] = field(default_factory=Counter)
    engine_s: float = 0.0


class HeldQueue:
    """Each request once."""

    def __init__(self) -> None:
        self._by_id: dict[RequestId, HeldRequest] = {}
        self._lines: dict[str, _Line] = {}  # by tenant; none without a request
        self._by_deadline: list[HeldRequest] = []  # of those that have one
        self._shares = TenantShares(CREDIT_TOKENS)
        self._num_bodies = 0.0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[RequestId]:
        return iter(list(self._by_id))

    @property
    def num_bodies(self) -> float:
        """HTTP requests that are new here: one with n prompts, of which k wait, is k/n. Not who had a replica
        before."""
        return self._num_bodies

    @property
    def engine_s(self) -> float:
        """Seconds of replicas' time that all of them will take; what is unknown counts as 0."""
        return max(0.0, sum([line.engine_s for line in self._lines.values()]))  # each a sum of differences

    @property
    def tenants(self) -> Set[str]:
        """Of whom somebody is here."""
        return self._lines.keys()

    @property
    def num_tenants(self) -> int:
        """Of whom somebody is here."""
        return len(self._lines)

    def num_of(self, tenant: str) -> int:
        line = self._lines.get(tenant)
        return len(line.in_order) if line is not None else 0

    def get(self, request_id: RequestId) -> HeldRequest | None:
        return self._by_id.get(request_id)

    # --- coming and going ---------------------------------------------------------------------

    def add(self, held: HeldRequest) -> None:
        """O(log n) to find its places, and a memory move; so is removing."""
        self._by_id[held.request_id] = held
        self._num_bodies += _bodies(held)
        line = self._lines.get(held.tenant)
        if line is None:
            line = self._lines[held.tenant] = _Line(held.query.share)
            self._shares.contend(self._lines.keys())
        line.share = held.query.share
        line.engine_s += held.engine_s
        line.priorities[held.query.priority] += 1
        insort(line.in_order, held, key=_place)
        insort(line.by_age, held, key=_age)
        if held.deadline < float("inf"):
            insort(self._by_deadline, held, key=_deadline)

    def remove(self, held: HeldRequest) -> None:
        del self._by_id[held.request_id]
        # Of a sum of differences nothing may be left over.
        self._num_bodies = self._num_bodies - _bodies(held) if self._by_id else 0.0
        line = self._lines[held.tenant]
        line.engine_s -= held.engine_s
        line.priorities[held.query.priority] -= 1
        if not line.priorities[held.query.priority]:
            del line.priorities[held.query.priority]
        _remove(line.in_order, held, _place)
        _remove(line.by_age, held, _age)
        if held.deadline < float("inf"):
            _remove(self._by_deadline, held, _deadline)
        if not line.in_order:  # nor here
            del self._lines[held.tenant]
            self._shares.contend(self._lines.keys())

    def reprice(self, held: HeldRequest, *, engine_s: float, order: float) -> None:
        """It was weighed anew; it need not be held (yet)."""
        line = self._lines[held.tenant] if held.request_id in self._by_id else None
        if line is not None:
            line.engine_s += engine_s - held.engine_s
        held.engine_s = engine_s
        if order == held.order:
            return
        if line is not None:
            _remove(line.in_order, held, _place)
        held.order = order
        if line is not None:
            insort(line.in_order, held, key=_place)

    def charge(self, tenant: str, num_tokens: int, share: float) -> None:
        """Computed for it, or about to be; also while nobody waits, or whoever has had most is forgotten in
        every moment that finds the queue empty."""
        self._shares.charge(tenant, num_tokens, share)

    def ahead(self, tenant: str) -> float:
        """Tokens, for its share, that it has had of this Router beyond what a newcomer begins with."""
        return self._shares.ahead(tenant)

    # --- orders -------------------------------------------------------------------------------

    def in_turn(self, oldest_first_before: float) -> Iterator[HeldRequest]:
        """Everybody held, by whose turn it is; of a tenant, whoever came by then by age, then in order.

        A copy: who has had its turn may leave or move. A tenant's is made when its first turn comes: of a
        thousand that wait, a window looks at the requests of a few.
        """
        if len(self._lines) < 2:
            lines = list(self._lines.values())
            return _in_turn(lines[0], oldest_first_before) if lines else iter(())
        self._shares.contend(self._lines.keys())
        return self._fairly(dict(self._lines), oldest_first_before)

    def _fairly(self, lines: Mapping[str, _Line], oldest_first_before: float) -> Iterator[HeldRequest]:
        """As if each were charged when it is its turn."""
        heap = [(*self._shares.turn(tenant), tenant) for tenant in lines]
        heapq.heapify(heap)
        number = itertools.count(max(last for _, last, _ in heap) + 1)
        turns: dict[str, Iterator[HeldRequest]] = {}
        while heap:
            charged, _, tenant = heap[0]
            if tenant not in turns:
                turns[tenant] = _in_turn(lines[tenant], oldest_first_before)
            held = next(turns[tenant], None)
            if held is None:
                heapq.heappop(heap)
                continue
            heapq.heapreplace(heap, (charged + held.uncached_tokens / held.query.share, next(number), tenant))
            yield held

    def seconds_before(self, held: HeldRequest, *, in_order: bool) -> float:
        """Of replicas' time, for those that go before it: of its tenant's and, share for share, of others'.

        in_order: of its tenant's those whose turn is before its own, or else all that are as urgent. It need
        not be held. O(1) where one tenant is here and its requests are equally urgent, and all count.
        """
        own = self._own_seconds(held, in_order=in_order)
        others = [line for tenant, line in self._lines.items() if tenant != held.tenant]
        if not others:
            return max(0.0, own)
        per_share = (own + held.engine_s) / held.query.share
        return own + sum([min(per_share * line.share, max(0.0, line.engine_s)) for line in others])

    def _own_seconds(self, held: HeldRequest, *, in_order: bool) -> float:
        line = self._lines.get(held.tenant)
        if line is None:
            return 0.0
        if in_order:
            before = line.in_order[: bisect_left(line.in_order, _place(held), key=_place)]
            return sum([other.engine_s for other in before])
        urgency = held.query.priority
        if all(priority <= urgency for priority in line.priorities):
            return line.engine_s
        return sum([other.engine_s for other in line.in_order if other.query.priority <= urgency])

    def came_before(self, time: float) -> list[HeldRequest]:
        """Oldest first."""
        aged = [
            line.by_age[: bisect_left(line.by_age, (time, -1), key=_age)] for line in self._lines.values()
        ]
        return list(heapq.merge(*aged, key=_age))

    def together_with(self, held: HeldRequest) -> list[HeldRequest]:
        """What came in the same HTTP request and is here, itself included. O(its tenant's requests)."""
        shared = held.query.admittance
        if shared is None:
            return [held]
        return [each for each in self._lines[held.tenant].by_age if each.query.admittance is shared]

    @property
    def next_deadline(self) -> HeldRequest | None:
        """Whose comes first; None: nobody has one."""
        return self._by_deadline[0] if self._by_deadline else None


def _in_turn(line: _Line, oldest_first_before: float) -> Iterator[HeldRequest]:
    if len(line.priorities) == 1:  # then they age in the order they came
        floor = oldest_first_before - line.in_order[0].lag_s
        num_aged = bisect_right(line.by_age, floor, key=lambda held: held.since)
        if not num_aged:
            return iter(line.in_order[:])
        young = [held for held in line.in_order if held.since > floor]
        return itertools.chain(line.by_age[:num_aged], young)
    aged = [held for held in line.by_age if held.since + held.lag_s <= oldest_first_before]
    aged.sort(key=lambda held: (held.since + held.lag_s, held.number))
    young = [held for held in line.in_order if held.since + held.lag_s > oldest_first_before]
    return itertools.chain(aged, young)


def _bodies(held: HeldRequest) -> float:
    return held.query.part if held.query.is_new else 0.0


def _place(held: HeldRequest) -> tuple[float, int]:
    return held.order, held.number


def _age(held: HeldRequest) -> tuple[float, int]:
    return held.since, held.number


def _deadline(held: HeldRequest) -> tuple[float, int]:
    return held.deadline, held.number


def _remove(
    ordered: list[HeldRequest], held: HeldRequest, key: Callable[[HeldRequest], tuple[float, int]]
) -> None:
    index = bisect_left(ordered, key(held), key=key)
    assert ordered[index] is held, "the lists are in order, and numbers are unique"
    del ordered[index]
