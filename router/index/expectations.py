"""Which requests stand behind each prediction in the index, so that a wrong one ends early.

A routed prompt is expected in its replica's cache. It will not be there if the request is refused, lost,
cancelled before its first token, or taken by another replica: then the prediction ends at once instead
of drawing twins to a cold replica until it expires. Twins share one prediction, which therefore ends
only with the last of them.

Knows request ids, replicas and hints; knows neither load nor decisions. Owner: the router's event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from cache.types import HashHint, ReplicaId, RequestId


class PredictionIndex(Protocol):
    """What is asked of the index."""

    def predict(self, replica_id: ReplicaId, hints: Sequence[HashHint], expires_at: float) -> None: ...

    def retract(self, replica_id: ReplicaId, hints: Sequence[HashHint]) -> None: ...


class _Expectation(NamedTuple):
    replica_id: ReplicaId
    hints: Sequence[HashHint]

    @property
    def key(self) -> tuple[ReplicaId, HashHint]:
        return self.replica_id, self.hints[-1]


class Expectations:
    """The predictions of requests that have no token yet. O(1) per call beside the index's own work."""

    def __init__(self, index: PredictionIndex, ttl_s: float) -> None:
        self._index = index
        self._ttl_s = ttl_s
        self._open: dict[RequestId, _Expectation] = {}
        self._num_behind: dict[tuple[ReplicaId, HashHint], int] = {}  # open expectations of one prediction

    def __len__(self) -> int:
        return len(self._open)

    def expect(
        self, request_id: RequestId, replica_id: ReplicaId, hints: Sequence[HashHint], now: float
    ) -> None:
        """The request was sent there, and nowhere else any more."""
        self.drop(request_id)
        if not hints:
            return
        expectation = self._open[request_id] = _Expectation(replica_id, hints)
        key = expectation.key
        self._num_behind[key] = self._num_behind.get(key, 0) + 1
        self._index.predict(replica_id, hints, now + self._ttl_s)

    def keep(self, request_id: RequestId) -> None:
        """Its prompt has been computed: the prediction stays until events confirm it or it expires."""
        self._close(request_id)

    def drop(self, request_id: RequestId) -> None:
        """Its prompt will not be computed there. Nothing happens after `keep`; idempotent."""
        expectation = self._close(request_id)
        if expectation is not None and expectation.key not in self._num_behind:
            self._index.retract(expectation.replica_id, expectation.hints)

    def _close(self, request_id: RequestId) -> _Expectation | None:
        expectation = self._open.pop(request_id, None)
        if expectation is not None:
            left = self._num_behind.pop(expectation.key) - 1
            if left:
                self._num_behind[expectation.key] = left
        return expectation
