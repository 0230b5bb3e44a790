"""Those that a router holds, in the orders that are asked of them: whose turn it is, by age, by deadline.

Knows places and times; knows neither replicas nor what is decided. Owner: the router's event loop.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator

from cache.types import RequestId
from router.placement.held_request import HeldRequest


class HeldQueue:
    """Each request once."""

    def __init__(self) -> None:
        self._by_id: dict[RequestId, HeldRequest] = {}
        # Each sorted by what its name says. Whoever is held is in the first two.
        self._in_order: list[HeldRequest] = []
        self._by_age: list[HeldRequest] = []
        self._by_deadline: list[HeldRequest] = []  # of those that have one
        self._engine_s = 0.0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    @property
    def engine_s(self) -> float:
        """Seconds of replicas' time that all of them will take; what is unknown counts as 0."""
        return max(0.0, self._engine_s)  # a sum that is added to and taken from

    def get(self, request_id: RequestId) -> HeldRequest | None:
        return self._by_id.get(request_id)

    def add(self, held: HeldRequest) -> None:
        """O(log n) to find its places, and a memory move; so is removing."""
        self._by_id[held.request_id] = held
        self._engine_s += held.engine_s
        insort(self._in_order, held, key=_place)
        insort(self._by_age, held, key=_age)
        if held.deadline < float("inf"):
            insort(self._by_deadline, held, key=_deadline)

    def remove(self, held: HeldRequest) -> None:
        del self._by_id[held.request_id]
        # Of a sum of differences nothing may be left over.
        self._engine_s = self._engine_s - held.engine_s if self._by_id else 0.0
        _remove(self._in_order, held, _place)
        _remove(self._by_age, held, _age)
        if held.deadline < float("inf"):
            _remove(self._by_deadline, held, _deadline)

    def reprice(self, held: HeldRequest, *, engine_s: float, order: float) -> None:
        """It was weighed anew; it need not be held (yet)."""
        is_held = held.request_id in self._by_id
        if is_held:
            self._engine_s += engine_s - held.engine_s
        held.engine_s = engine_s
        if order == held.order:
            return
        if is_held:
            _remove(self._in_order, held, _place)
        held.order = order
        if is_held:
            insort(self._in_order, held, key=_place)

    def in_turn(self, oldest_first_before: float) -> Iterator[HeldRequest]:
        """Everybody held: whoever came by then by age, then the others in order.

        A copy: who leaves or moves meanwhile does not disturb it.
        """
        num_aged = bisect_right(self._by_age, oldest_first_before, key=lambda held: held.since)
        if not num_aged:
            return iter(self._in_order[:])
        young = [held for held in self._in_order if held.since > oldest_first_before]
        return itertools.chain(self._by_age[:num_aged], young)

    def before(self, held: HeldRequest) -> list[HeldRequest]:
        """Those that go before it, in order; it need not be held."""
        return self._in_order[: bisect_left(self._in_order, _place(held), key=_place)]

    def came_before(self, time: float) -> list[HeldRequest]:
        """Oldest first."""
        return self._by_age[: bisect_left(self._by_age, (time, -1), key=_age)]

    @property
    def next_deadline(self) -> HeldRequest | None:
        """Whose comes first; None: nobody has one."""
        return self._by_deadline[0] if self._by_deadline else None


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
