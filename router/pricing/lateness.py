"""Replicas that keep requests waiting much longer than was expected, whatever they say of themselves.

A replica's backlog is what it reported, less the time since: one that stops working looks the idler the
longer it says nothing, and would be sent all that is new. So what was expected of it is held beside what is
seen: a request that has waited much longer for its first token than expected, and waits still, will wait as
long again (the best guess while nothing is known but that it has not happened), and so will who comes after.
Whoever came later and has its first token already went before it, as shorter prompts and other tenants do:
the time that took was to be expected as well.

Knows names and seconds; knows neither load nor costs. Owner: the router's event loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache.types import ReplicaId, RequestId

LATE_S = 0.5  # beyond what was expected: less is what estimates are worth
LATE_TIMES = 3.0  # of what was expected, likewise


@dataclass(slots=True)
class _Sent:
    replica_id: ReplicaId
    sent_at: float
    expected_s: float  # and what those took that have gone before it since
    own_s: float

    def lateness_s(self, now: float) -> float:
        """Seconds beyond what was expected; 0 while that says nothing."""
        late_s = now - self.sent_at - self.expected_s
        return late_s if late_s > LATE_S + (LATE_TIMES - 1.0) * self.expected_s else 0.0


class Lateness:
    """The requests that have no token yet, by where they are."""

    def __init__(self) -> None:
        self._sent: dict[RequestId, _Sent] = {}
        self._waiting: dict[ReplicaId, dict[RequestId, _Sent]] = {}  # oldest first

    def sent(
        self,
        request_id: RequestId,
        replica_id: ReplicaId,
        now: float,
        expected_s: float,
        own_s: float = 0.0,
    ) -> None:
        """It is there now, and nowhere else any more. O(1).

        expected_s: until its first token. own_s: of the replica's time, for its prefill.
        """
        self.over(request_id)
        self._sent[request_id] = sent = _Sent(replica_id, now, expected_s, own_s)
        self._waiting.setdefault(replica_id, {})[request_id] = sent

    def moved(self, request_id: RequestId, replica_id: ReplicaId, now: float) -> None:
        """Another replica has taken it, which was expected to take as long. Nothing if it is not waiting."""
        sent = self._sent.get(request_id)
        if sent is not None and sent.replica_id != replica_id:
            self.sent(request_id, replica_id, now, sent.expected_s, sent.own_s)

    def answered(self, request_id: RequestId) -> ReplicaId | None:
        """It has its first token; where it was, None if it does not wait. O(those that came before it)."""
        sent = self._sent.get(request_id)
        if sent is not None:
            for earlier_id, earlier in self._waiting[sent.replica_id].items():
                if earlier_id == request_id:
                    break
                earlier.expected_s += sent.own_s
        return self.over(request_id)

    def over(self, request_id: RequestId) -> ReplicaId | None:
        """It waits for no first token any more; where it was. Idempotent."""
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return None
        waiting = self._waiting[sent.replica_id]
        del waiting[request_id]
        if not waiting:
            del self._waiting[sent.replica_id]
        return sent.replica_id

    def gone(self, replica_id: ReplicaId) -> None:
        """It has left: what its requests wait for says nothing of the others. O(those)."""
        for request_id in self._waiting.pop(replica_id, ()):
            del self._sent[request_id]

    def late(self, at: float, num_replicas: int) -> dict[ReplicaId, float]:
        """Who was late at that time, and by how much: its oldest request's seconds. O(replicas).

        Where all are, what was expected was wrong, or the machine they share is slow: it is by how much they
        are later than the least late of them.
        """
        oldest = {name: next(iter(waiting.values())) for name, waiting in self._waiting.items()}
        found = {name: late_s for name, sent in oldest.items() if (late_s := sent.lateness_s(at))}
        least = min(found.values()) if found and len(found) >= num_replicas else 0.0
        return {name: late_s - least for name, late_s in found.items() if late_s > least}
