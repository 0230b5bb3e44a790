"""The load between two batches: what the engine last said, and what has arrived since.

Inside a step of a few hundred milliseconds the engine takes nothing in, and every router but the one that
sent them would go on routing as if the requests waiting at its door were not there. So the door counts
them: as waiting, with as many uncached tokens as the published cache and earlier arrivals leave, until the
engine names them in a batch or refuses them.

Pure bookkeeping: knows no sockets and no threads. Owner: the publisher's thread.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import msgspec

from cache.events import MAX_ADMITTED_PER_BATCH, Load, RequestEnded
from cache.scheduling_order import SchedulingOrder
from cache.types import HashHint, RequestId
from replica.scheduling.told_queue import QueuedPrompt, origin, told_queue

MAX_RECENT = 1024  # ids remembered for routers that lost the batch naming them
MAX_EXPECTED_S = 10.0  # a request cancelled before it was computed leaves nothing in the cache


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request at the engine's door."""

    request_id: RequestId
    num_tokens: int  # all that must be in the cache before its next token
    hints: Sequence[HashHint]  # of its full blocks, parent first; () = unknown
    block_size: int
    tenant: str = ""
    share: float = 1.0
    priority: int = 0
    waited_s: float = 0.0  # at its Router


class _Waiting(NamedTuple):
    prompt: QueuedPrompt
    attention: int  # (query, key) pairs of its tokens to compute
    new_hints: Sequence[HashHint]  # of the blocks it will add to the cache


class _TakenIn(NamedTuple):
    new_hints: Sequence[HashHint]  # not empty
    named_s: float


class Arrivals:
    """Requests not yet in the engine's own account of itself."""

    def __init__(self, order: SchedulingOrder, max_batched_tokens: int) -> None:
        """order: of the engine's queue."""
        self._order = order
        self._max_batched_tokens = max_batched_tokens
        self._load = Load()
        self._load_made_s = 0.0
        self._waiting: dict[RequestId, _Waiting] = {}
        self._uncached_tokens = 0  # of all of them
        self._attention = 0
        self._taken_in: dict[RequestId, _TakenIn] = {}  # named, and not known to be in the cache yet
        self._expected: Counter[HashHint] = Counter()  # blocks that both will leave in the cache
        self._unnamed: dict[RequestId, None] = {}  # in no update yet
        self._named: deque[RequestId] = deque(maxlen=MAX_RECENT)
        self._is_draining = False
        self._tells_draining = False  # in no update yet

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_news(self) -> bool:
        """Whether an update would name a request that none has named, or say first that it drains."""
        return bool(self._unnamed) or self._tells_draining

    def drain(self) -> None:
        """The replica wants no new requests. Those that come all the same are served."""
        self._tells_draining = not self._is_draining
        self._is_draining = True

    def arrived(self, arrival: Arrival, cached: Container[HashHint], now_s: float) -> None:
        """cached: the published cache, closed under parents. O(log(blocks)) and the blocks not there."""
        if arrival.request_id in self._waiting:
            return  # the engine will refuse the second of that name
        num_hit = self._num_leading(arrival.hints, cached)
        # At least one token is always computed.
        uncached = max(1, arrival.num_tokens - num_hit * arrival.block_size)
        attention = uncached * (2 * arrival.num_tokens - uncached) // 2
        prompt = self._queued_prompt(arrival, uncached, now_s)
        waiting = _Waiting(prompt, attention, arrival.hints[num_hit:])
        self._waiting[arrival.request_id] = waiting
        self._uncached_tokens += uncached
        self._attention += attention
        self._expected.update(waiting.new_hints)
        self._unnamed[arrival.request_id] = None

    def refused(self, request_id: RequestId) -> None:
        """It will not be served here. Nothing happens if it is unknown."""
        waiting = self._take(request_id)
        if waiting is not None:
            self._stop_expecting(waiting.new_hints)

    def settle(self, load: Load, now_s: float, cached: Container[HashHint]) -> None:
        """The engine's own account, of now: whom it names needs no counting here any more.

        Their blocks are expected until they are in the published cache: a twin that comes while they are
        computed will find them.
        """
        self._load, self._load_made_s = load, now_s
        self._named.extend(load.admitted)
        for request_id in load.admitted:
            waiting = self._take(request_id)
            if waiting is not None and waiting.new_hints:
                self._taken_in[request_id] = _TakenIn(waiting.new_hints, now_s)
        for request_id, taken in list(self._taken_in.items()):
            if taken.new_hints[-1] in cached or now_s > taken.named_s + MAX_EXPECTED_S:
                del self._taken_in[request_id]
                self._stop_expecting(taken.new_hints)

    def beside(self, now_s: float) -> Load:
        """The engine's account, as it was settled just now, and whoever is at the door beside it: that itself
        while nobody is."""
        load = self._load
        if not (self._waiting or self._tells_draining or (self._is_draining and not load.is_draining)):
            return load
        room = MAX_ADMITTED_PER_BATCH - len(load.admitted)
        return self.load(now_s, (*load.admitted, *self.take_unnamed(room)), load.ended)

    def take_unnamed(self, at_most: int = MAX_ADMITTED_PER_BATCH) -> tuple[RequestId, ...]:
        """Requests that arrived since this was asked last, and that the engine has not named either; the
        first of them, and the others the next time."""
        unnamed = tuple(islice(self._unnamed, at_most))
        for request_id in unnamed:
            del self._unnamed[request_id]
        return unnamed

    def recent(self) -> tuple[RequestId, ...]:
        """Whoever is waiting, or was named by the engine lately: for a router that may have missed it."""
        return (*self._named, *self._waiting)

    def load(
        self, now_s: float, admitted: tuple[RequestId, ...], ended: tuple[RequestEnded, ...] = ()
    ) -> Load:
        """The engine's work now, as far as the door can tell."""
        self._tells_draining = False
        left, attention = self._left_share(now_s), self._load.queued_attention
        return msgspec.structs.replace(
            self._load,
            queued_uncached_tokens=int(left * self._load.queued_uncached_tokens) + self._uncached_tokens,
            queued_attention=None if attention is None else int(left * attention) + self._attention,
            queued=told_queue(
                [waiting.prompt for waiting in self._waiting.values()],
                self._order,
                now_s,
                told=self._load.queued,
                told_at=origin(self._order, self._load_made_s),
            ),
            num_waiting=self._load.num_waiting + len(self._waiting),
            is_draining=self._is_draining or self._load.is_draining,
            admitted=admitted,
            ended=ended,
        )

    def _queued_prompt(self, arrival: Arrival, uncached: int, now_s: float) -> QueuedPrompt:
        """Its place as far as the door can tell: what a twin before it has yet to compute, it cannot."""
        order, pace, own_s = self._order, self._load.step_time, 0.0
        if pace is not None:
            own_s = pace.prefill_s(uncached, arrival.num_tokens - uncached, self._max_batched_tokens)
        place = order.place(own_s, came_s=now_s - arrival.waited_s, now_s=now_s)
        return QueuedPrompt(arrival.tenant, arrival.share, place + order.lag(arrival.priority), uncached)

    def _left_share(self, now_s: float) -> float:
        """Of what the engine had queued: 1 less what it has computed since, at its own measured pace."""
        load = self._load
        queued, pace, attention = load.queued_uncached_tokens, load.step_time, load.queued_attention
        if not queued or pace is None:
            return 1.0
        if attention is None:
            attention = queued * queued // (2 * max(1, load.num_waiting))
        whole_s = pace.step_s(queued, attention, 1)
        return max(0.0, 1.0 - (now_s - self._load_made_s) / whole_s) if whole_s > 0 else 1.0

    def _num_leading(self, hints: Sequence[HashHint], cached: Container[HashHint]) -> int:
        """Leading blocks cached or on their way; both are closed under parents, so halving finds them."""
        low, high = 0, len(hints)
        while low < high:
            middle = (low + high) // 2
            if hints[middle] in cached or hints[middle] in self._expected:
                low = middle + 1
            else:
                high = middle
        return low

    def _take(self, request_id: RequestId) -> _Waiting | None:
        """It is not waiting any more; its blocks are still expected."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._uncached_tokens -= waiting.prompt.tokens
            self._attention -= waiting.attention
            self._unnamed.pop(request_id, None)
        return waiting

    def _stop_expecting(self, hints: Sequence[HashHint]) -> None:
        for hint in hints:
            self._expected[hint] -= 1
            if not self._expected[hint]:
                del self._expected[hint]
