"""KV events out of the process: PUB for batches, load and reports, ROUTER for snapshots, all on one thread.

    engine thread -- publish(batch) --> queue --> publisher thread --> PUB     [b"kv", encode(EventBatch)]
                -- report(totals) -----^                |                     [b"load", encode(LoadUpdate)]
    event loop ---- arrived(request) --^                |                     [b"report", encode_report(…)]
                                        [b"snapshot"] --+------------> ROUTER  [identity, head, hashes]

The thread keeps its own set of hashes, moved on by each batch as it is sent: so a snapshot shows the cache
exactly after the batch sent last, is answered while the engine is inside a long step, and no
state is shared with the engine thread. For the same reason a request that arrives during a step is on its
way to every router at once (`arrivals.py`), not when the step is over.
Knows sockets and bytes; knows no blocks and no prompts. Never unpickles.
"""

from __future__ import annotations

import logging
import math
import queue
import secrets
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import msgspec
from zmq.constants import (
    IPV6,
    LAST_ENDPOINT,
    LINGER,
    MAXMSGSIZE,
    NOBLOCK,
    PAIR,
    POLLIN,
    PUB,
    ROUTER,
    SNDHWM,
)
from zmq.error import Again, ContextTerminated, ZMQError
from zmq.sugar.context import Context
from zmq.sugar.poll import Poller

from cache.engine_report import EngineReport, encode_report
from cache.event_wire import encode, encode_snapshot
from cache.events import FORMAT_VERSION, Digest, EventBatch, LoadUpdate, Snapshot
from cache.scheduling_order import SchedulingOrder
from cache.types import HashHint, RequestId
from replica.engine.arrivals import Arrival, Arrivals
from replica.errors import EventSocketError

TOPIC = b"kv"
LOAD_TOPIC = b"load"
REPORT_TOPIC = b"report"
SNAPSHOT_REQUEST = b"snapshot"

MAX_QUEUED_BATCHES = 10_000  # per subscriber; a slower one loses batches, sees the gap, asks for a snapshot
MAX_QUEUED_SNAPSHOTS = 16  # per asking router, which waits for one before it asks again
MAX_REQUEST_BYTES = 1024  # of a topic, too: ZMQ drops the connection of whoever sends more

# The first of several arrivals is told of at once, the others of a burst together this much later.
UPDATE_INTERVAL_S = 0.002

_SNAPSHOT_SLICE = 8192  # hashes copied at a time, a quarter of a millisecond: then other threads get a turn
_WAKE = b""

logger = logging.getLogger(__name__)


def new_epoch() -> int:
    """Names one life of one engine's cache: random, so that a restart never repeats one."""
    return secrets.randbits(64)


@dataclass(frozen=True, slots=True)
class _Refusal:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class _Draining:
    pass


_News = EventBatch | EngineReport | Arrival | _Refusal | _Draining


class Publisher:
    """Binds when built, so that the endpoints are known; sends between `start` and `close`."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        epoch: int,
        tells_blocks: bool = True,
        order: SchedulingOrder,
        max_batched_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """port: 0 for two free ones, else PUB listens on `port` and snapshots on `port + 1`.
        tells_blocks: False: batches and snapshots carry load alone, as those of an empty cache would.
        order, max_batched_tokens: the engine's, by which those who have just come are told of.

        Raises EventSocketError when they cannot listen there.
        """
        self._epoch = epoch
        self._tells_blocks = tells_blocks
        self._context: Any = Context()
        try:
            self._pub = self._bind(
                PUB, host, port, {SNDHWM: MAX_QUEUED_BATCHES, MAXMSGSIZE: MAX_REQUEST_BYTES}
            )
            self._router = self._bind(
                ROUTER,
                host,
                port + 1 if port else 0,
                {SNDHWM: MAX_QUEUED_SNAPSHOTS, MAXMSGSIZE: MAX_REQUEST_BYTES},
            )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.event_endpoint = _endpoint(self._pub)
        self.snapshot_endpoint = _endpoint(self._router)
        # Woken through a socket, because the thread must wait for requests and batches at once.
        self._wake_out = self._context.socket(PAIR)
        self._wake_in = self._context.socket(PAIR)
        self._wake_in.bind("inproc://wake")
        self._wake_out.connect("inproc://wake")
        self._wake_lock = threading.Lock()  # guards `_wake_out`: the engine sends, whoever closes sends too
        self._is_closed = False
        self._news: queue.SimpleQueue[_News | None] = queue.SimpleQueue()
        self._clock = clock
        # Publisher thread only.
        # Whether host memory alone holds it; in order of storing: parents before children.
        self._hashes: dict[HashHint, bool] = {}
        self._digest = Digest()  # of them
        self._seq = 0
        self._arrivals = Arrivals(order, max_batched_tokens)
        self._num_updates = 0  # since the last batch
        self._updated_s = -float("inf")
        self._thread = threading.Thread(target=self._run, name="warmpath-publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def publish(self, batch: EventBatch) -> None:
        """Hand over the next batch, in order of `seq`. One thread only; never blocks."""
        self._tell(batch)

    def report(self, report: EngineReport) -> None:
        """Hand over what metrics tell of the engine. Any thread; never blocks."""
        self._tell(report)

    def arrived(self, arrival: Arrival) -> None:
        """A request is about to be handed to the engine. Any thread; never blocks.

        Before the engine can know of it: what settles it must come later in the queue.
        """
        self._tell(arrival)

    def refused(self, request_id: RequestId) -> None:
        """The engine does not serve this request after all. Any thread; never blocks."""
        self._tell(_Refusal(request_id))

    def draining(self) -> None:
        """The replica wants no new requests: every router hears it now. Any thread; never blocks."""
        self._tell(_Draining())

    def close(self) -> None:
        """Stop the thread and close every socket. May be called twice."""
        with self._wake_lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._news.put(None)
            if self._thread.is_alive():
                self._wake_out.send(_WAKE)
        if self._thread.is_alive():
            self._thread.join()
        self._context.destroy(linger=0)

    def _bind(self, kind: int, host: str, port: int, options: dict[int, int]) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(LINGER, 0)
        if ":" in host:
            socket.setsockopt(IPV6, 1)
        for name, value in options.items():
            socket.setsockopt(name, value)
        address = f"[{host}]" if ":" in host else host
        try:
            socket.bind(f"tcp://{address}:{port if port else '*'}")
        except ZMQError as error:
            raise EventSocketError(host, port, str(error)) from error
        return socket

    def _tell(self, news: _News) -> None:
        self._news.put(news)
        self._wake()

    def _wake(self) -> None:
        with self._wake_lock:
            if not self._is_closed:
                try:
                    self._wake_out.send(_WAKE, NOBLOCK)
                except Again:
                    pass  # a thousand wake-ups are waiting already

    # -- publisher thread -------------------------------------------------------------------------

    def _run(self) -> None:
        poller = Poller()
        poller.register(self._wake_in, POLLIN)
        poller.register(self._router, POLLIN)
        while True:
            ready = dict(poller.poll(self._idle_ms()))
            try:
                if self._wake_in in ready:
                    self._drain_wake()
                    if not self._take_news():
                        return
                self._send_update_if_due()
                if self._router in ready:
                    self._answer()
            except ContextTerminated:
                return
            except Exception:
                # Losing the thread would lose all events.
                logger.exception("event publisher failed, going on")

    def _drain_wake(self) -> None:
        while True:
            try:
                self._wake_in.recv(NOBLOCK)
            except Again:
                return

    def _take_news(self) -> bool:
        """Send and count what is queued; False when told to stop."""
        while True:
            try:
                news = self._news.get_nowait()
            except queue.Empty:
                return True
            if news is None:
                return False
            try:
                self._take(news)
            except ContextTerminated:
                raise
            except Exception:
                # Events are a hint: losing one shows as a gap. What is queued behind it has been woken for.
                logger.exception("event publisher failed, going on")

    def _take(self, news: _News) -> None:
        match news:
            case Arrival():
                self._arrivals.arrived(news, self._hashes, self._clock())
            case _Refusal():
                self._arrivals.refused(news.request_id)
            case _Draining():
                self._arrivals.drain()
            case EngineReport():
                self._pub.send_multipart([REPORT_TOPIC, encode_report(news)])
            case EventBatch():
                told = self._apply(news)
                self._pub.send_multipart([TOPIC, encode(told if self._tells_blocks else _load_alone(told))])

    def _apply(self, batch: EventBatch) -> EventBatch:
        """The batch as it is sent: with those beside its load who are at the door."""
        assert batch.seq == self._seq + 1, "batches are published in order"
        for name in batch.removed:
            del self._hashes[name]
        self._hashes.update(dict.fromkeys(batch.stored, False))
        self._hashes.update(dict.fromkeys(batch.hosted, True))
        self._seq, self._digest = batch.seq, batch.digest
        self._num_updates = 0
        now_s = self._clock()
        self._arrivals.settle(batch.load, now_s, self._hashes)
        load = self._arrivals.beside(now_s)
        return batch if load is batch.load else msgspec.structs.replace(batch, load=load)

    def _idle_ms(self) -> int | None:
        """Milliseconds until an update is due; None = there is nothing to tell."""
        if not self._arrivals.has_news:
            return None
        return math.ceil(1000 * max(0.0, self._updated_s + UPDATE_INTERVAL_S - self._clock()))

    def _send_update_if_due(self) -> None:
        """Tell of arrivals that no batch has named: the engine may be inside a long step."""
        now_s = self._clock()
        if not self._arrivals.has_news or now_s < self._updated_s + UPDATE_INTERVAL_S:
            return
        self._updated_s = now_s
        self._num_updates += 1
        load = self._arrivals.load(now_s, self._arrivals.take_unnamed())
        update = LoadUpdate(FORMAT_VERSION, self._epoch, self._seq, self._num_updates, load)
        self._pub.send_multipart([LOAD_TOPIC, encode(update)])

    def _answer(self) -> None:
        """Answer one request. Whoever asks anything else gets no answer."""
        frames = self._router.recv_multipart(NOBLOCK)
        if len(frames) != 2 or frames[1] != SNAPSHOT_REQUEST:
            logger.warning("not a snapshot request, ignored", extra={"num_frames": len(frames)})
            return
        load = self._arrivals.load(self._clock(), self._arrivals.recent())
        hashes, hosted, digest = (*self._packed(), self._digest) if self._tells_blocks else ((), (), Digest())
        snapshot = Snapshot(FORMAT_VERSION, self._epoch, self._seq, hashes, load, digest, hosted)
        self._router.send_multipart([frames[0], *encode_snapshot(snapshot)], NOBLOCK)

    def _packed(self) -> tuple[Sequence[HashHint], Sequence[HashHint]]:
        """All hashes, and those of host memory alone, as packed u64.

        In slices: the engine's thread waits for this one no longer than that.
        """
        packed, hosted, entries = array("Q"), array("Q"), iter(self._hashes.items())
        while part := list(islice(entries, _SNAPSHOT_SLICE)):
            packed.extend([name for name, _ in part])
            hosted.extend([name for name, is_hosted in part if is_hosted])
            time.sleep(0)
        return cast("Sequence[HashHint]", packed), cast("Sequence[HashHint]", hosted)


def _load_alone(batch: EventBatch) -> EventBatch:
    return msgspec.structs.replace(
        batch, stored=(), hosted=(), removed=(), digest=Digest(), host_digest=Digest()
    )


def _endpoint(socket: Any) -> str:
    return str(socket.getsockopt_string(LAST_ENDPOINT))
