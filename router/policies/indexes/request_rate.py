"""How many requests each replica was sent lately. Knows times and replicas."""

from __future__ import annotations

from collections import deque

from cache.types import ReplicaId


class RequestRate:
    """A sliding window, counted in slices so that it stays small at any rate."""

    def __init__(self, window_s: float, num_slices: int = 60) -> None:
        self._slice_s = window_s / num_slices
        self._num_slices = num_slices
        self._slices: dict[ReplicaId, deque[list[int]]] = {}  # [slice number, requests], oldest first
        self._sums: dict[ReplicaId, int] = {}

    def add(self, replica_id: ReplicaId) -> None:
        self._slices.setdefault(replica_id, deque())
        self._sums.setdefault(replica_id, 0)

    def remove(self, replica_id: ReplicaId) -> None:
        self._slices.pop(replica_id, None)
        self._sums.pop(replica_id, None)

    def record(self, replica_id: ReplicaId, now: float) -> None:
        """A request was sent there; nothing happens for an unknown replica."""
        slices = self._slices.get(replica_id)
        if slices is None:
            return
        number = int(now / self._slice_s)
        if slices and slices[-1][0] == number:
            slices[-1][1] += 1
        else:
            slices.append([number, 1])
            self._drop_old(replica_id, now)
        self._sums[replica_id] += 1

    def num_requests(self, replica_id: ReplicaId, now: float) -> int:
        """In the window that ends now; 0 for an unknown replica."""
        if replica_id not in self._slices:
            return 0
        self._drop_old(replica_id, now)
        return self._sums[replica_id]

    def _drop_old(self, replica_id: ReplicaId, now: float) -> None:
        slices = self._slices[replica_id]
        newest_gone = int(now / self._slice_s) - self._num_slices
        while slices and slices[0][0] <= newest_gone:
            self._sums[replica_id] -= slices.popleft()[1]
