"""Those that wait, by tenant, each tenant's in their order. Whose turn it is, others say.

Knows requests' places and tenants; knows neither blocks nor steps. Engine thread only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence

from replica.scheduling.request import Request


class WaitingQueue:
    """Each request once."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, list[Request]] = {}  # no tenant without one
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """All of them, tenant by tenant, each tenant's in their order."""
        for requests in self._by_tenant.values():
            yield from requests

    @property
    def tenants(self) -> frozenset[str]:
        """Those of whom somebody waits."""
        return frozenset(self._by_tenant)

    def queues(self) -> Iterable[tuple[str, Sequence[Request]]]:
        """Each tenant's requests, in their order; none without one. Not to be changed."""
        return self._by_tenant.items()

    def num_of(self, tenant: str) -> int:
        return len(self._by_tenant.get(tenant, ()))

    def add(self, request: Request) -> None:
        """O(log n) and a memory move; so is removing."""
        insort(self._by_tenant.setdefault(request.tenant, []), request, key=_place)
        self._size += 1

    def remove(self, request: Request) -> None:
        requests = self._by_tenant[request.tenant]
        index = bisect_left(requests, _place(request), key=_place)
        assert requests[index] is request, "places are unique, and never change"
        del requests[index]
        if not requests:
            del self._by_tenant[request.tenant]
        self._size -= 1

    def first(self, tenant: str) -> Request | None:
        """Who of that tenant is next; None if nobody of it waits."""
        requests = self._by_tenant.get(tenant)
        return requests[0] if requests else None


def _place(request: Request) -> tuple[float, int]:
    return request.place
