"""Prompts that wait at replicas for their first token: what of them goes before a newcomer.

Engines say whose prompts they have queued, and in which order they compute them (`Load.queued`), whichever
Router sent them; what this Router has sent and the engine has not named yet stays on top of that, as in its
load (`pricing/replica_load.py`). What that makes of one replica's queue is said in `replica_queue.py`.

A request's place is behind whoever is yet to compute what it is to find cached: a twin is not short before
its twin is there.

Knows replicas, requests and whose blocks are expected; knows no caches. Owner: the router's event loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set

from cache.events import Load
from cache.messages import ReplicaInfo
from cache.types import HashHint, ReplicaId, RequestId
from router.placement.decision import DecisionRecord, RouteQuery
from router.placement.replica_queue import LAST, Had, ReplicaQueue, Sent, newcomers

# Whether a replica holds a block of a prompt, by its index, and is not only expected to.
IsThere = Callable[[ReplicaId, Sequence[HashHint], int], bool]


class ReplicaQueues:
    """Told of each decision, of who took it, of when it waits no more, and of what engines say.

    Asked of replicas that it was told of alone.
    """

    def __init__(self, block_size: int, is_there: IsThere) -> None:
        self.block_size = block_size
        self._is_there = is_there
        self._by_id: dict[RequestId, Sent] = {}
        self._queues: dict[ReplicaId, ReplicaQueue] = {}
        self._waiting: dict[ReplicaId, ReplicaQueue] = {}  # of those, where somebody waits
        self._passable: dict[ReplicaId, ReplicaQueue] = {}  # of those, where prompts stand back

    def __len__(self) -> int:
        """Requests of this Router that wait for their first token."""
        return len(self._by_id)

    @property
    def passable(self) -> dict[ReplicaId, ReplicaQueue]:
        """Where somebody waits and may stand back for a shorter prompt; not to be changed."""
        return self._passable

    def may_stand_back(self, tenants: Set[str]) -> bool:
        """Whether any of them might let a request of one of these tenants by. O(replicas)."""
        if self._passable:
            return True
        waiting = self._waiting.values()
        return any([len(queue.lines) > 1 or queue.lines.keys() != tenants for queue in waiting])

    def place(self, replica_id: ReplicaId, query: RouteQuery, own_s: float, now: float) -> float:
        """Of a request that comes to that replica now, among its tenant's. own_s: of its prefill there."""
        return self._queues[replica_id].place(query, own_s, now)

    def promised_place(
        self, query: RouteQuery, hints: Sequence[HashHint], replica_id: ReplicaId, cached: int
    ) -> float:
        """Of whoever is yet to compute there the last of so many tokens of that prompt, which it is to find
        cached: it comes after that one. -inf: they are there. O(this Router's prompts there).

        hints: of its full blocks.
        """
        queue, last = self._queues[replica_id], cached // self.block_size - 1
        if not queue.preempts or last < 0:
            return -math.inf
        name = hints[last]  # of the whole prefix
        for sent in queue.sent.values():
            if len(sent.hints) > last and sent.hints[last] == name:
                if self._is_there(replica_id, hints, last):
                    break
                # For whoever is less urgent it does not wait: it computes the prefix itself.
                return sent.place - sent.lag + queue.order.lag(query.priority)
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
        queue, num_replicas = self._queues[replica_id], len(self._queues)
        return queue.part_before(tenant, num_tokens, share, place, lambda name: had(name) / num_replicas)

    def before_s(self, replica_id: ReplicaId, part: float, busy_until: float, now: float) -> float:
        """As `ReplicaQueue.before_s`."""
        return self._queues[replica_id].before_s(part, busy_until, now)

    # --- what becomes of them -----------------------------------------------------------------

    def decided(
        self, record: DecisionRecord, query: RouteQuery, hints: Sequence[HashHint], own_s: float
    ) -> None:
        """It waits at the one chosen, and nowhere else any more. O(prompts there).

        own_s: of its prefill there; 0 while that one's speed is unknown.
        """
        self.over(query.request_id)
        replica_id, cached = record.replica_id, record.cached_tokens
        place = self.place(replica_id, query, own_s, record.decided_at)
        place = max(place, self.promised_place(query, hints, replica_id, cached))
        lag = self._queues[replica_id].lag(query.priority)
        sent = Sent(
            replica_id, query.tenant, query.share, query.num_prompt_tokens - cached, place, lag, hints
        )
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
        del self._queues[sent.replica_id].sent[request_id]
        if sent.named_by is None:
            self._leave(sent)

    def said(self, replica_id: ReplicaId, load: Load, now: float) -> None:
        """That engine's account of its queue, in place of its last one. O(tenants, and what it names)."""
        for request_id in load.admitted:
            sent = self._by_id.get(request_id)  # None: another Router's, or it waits no more
            if sent is not None and sent.named_by != replica_id:
                if sent.named_by is None:
                    self._leave(sent)
                named = sent._replace(named_by=replica_id)
                self._by_id[request_id] = self._queues[sent.replica_id].sent[request_id] = named
        queue = self._queues[replica_id]
        if queue.lines or load.queued:
            queue.told({of.tenant: of for of in load.queued}, now)
            self._note(replica_id, queue)

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self._queues[replica_id] = ReplicaQueue(info.scheduling_order)

    def replica_removed(self, replica_id: ReplicaId) -> None:
        """O(those that wait there)."""
        queue = self._queues.pop(replica_id, None)
        self._waiting.pop(replica_id, None)
        self._passable.pop(replica_id, None)
        for request_id in queue.sent if queue is not None else ():
            del self._by_id[request_id]

    def _enter(self, request_id: RequestId, sent: Sent, now: float) -> None:
        queue = self._queues[sent.replica_id]
        self._by_id[request_id] = queue.sent[request_id] = sent
        if sent.named_by is None:
            queue.add(sent, now)
            self._note(sent.replica_id, queue)

    def _leave(self, sent: Sent) -> None:
        queue = self._queues[sent.replica_id]
        queue.remove(sent)
        self._note(sent.replica_id, queue)

    def _note(self, replica_id: ReplicaId, queue: ReplicaQueue) -> None:
        """Its queue has changed."""
        if not queue.lines:
            self._waiting.pop(replica_id, None)
            self._passable.pop(replica_id, None)
        elif replica_id not in self._waiting:
            self._waiting[replica_id] = queue
            if queue.preempts:
                self._passable[replica_id] = queue
