"""Which blocks the prompts in flight at each replica take, each block once however many of them share it.

From being sent until the end of the answer, waiting in the engine's queue included. Knows blocks, requests
and replicas; knows neither caches nor load.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from cache.types import HashHint, ReplicaId, RequestId


class BlocksInUse:
    def __init__(self) -> None:
        self._uses: dict[ReplicaId, Counter[HashHint]] = {}  # prompts in flight that take the block
        self._sent: dict[RequestId, tuple[ReplicaId, Sequence[HashHint]]] = {}

    def add(self, replica_id: ReplicaId) -> None:
        self._uses.setdefault(replica_id, Counter())

    def remove(self, replica_id: ReplicaId) -> None:
        """O(requests in flight)."""
        self._uses.pop(replica_id, None)
        gone = [request_id for request_id, (holder, _) in self._sent.items() if holder == replica_id]
        for request_id in gone:
            del self._sent[request_id]

    def begin(self, request_id: RequestId, replica_id: ReplicaId, chain: Sequence[HashHint]) -> None:
        """The prompt went there, and is nowhere else any more. Nothing is kept of an unknown replica.

        chain: of its full blocks, parent first. O(blocks).
        """
        self.end(request_id)
        uses = self._uses.get(replica_id)
        if uses is not None:
            uses.update(chain)
            self._sent[request_id] = replica_id, chain

    def end(self, request_id: RequestId) -> None:
        """The request is over. Nothing happens if it is unknown. O(blocks)."""
        replica_id, chain = self._sent.pop(request_id, (None, ()))
        if replica_id is None:
            return
        uses = self._uses[replica_id]
        for block in chain:
            uses[block] -= 1
            if not uses[block]:
                del uses[block]

    def with_prompt(self, replica_id: ReplicaId, chain: Sequence[HashHint]) -> int:
        """Blocks in use there if this prompt came too. O(log blocks)."""
        uses = self._uses.get(replica_id)
        if not uses:
            return len(chain)
        # Whoever takes a block takes all before it, so those in use are the first ones.
        num_shared = bisect_left(chain, True, key=lambda block: block not in uses)
        return len(uses) + len(chain) - num_shared
