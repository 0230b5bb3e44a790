"""Listens to every replica's KV events: sockets, tasks, retries.

One `Subscriber` per replica: SUB first, then a snapshot through a DEALER, so that nothing between the
two is lost; what the messages mean in which order is decided in `router/events/event_stream.py`.

    PUB     [b"kv", encode(EventBatch)], [b"load", encode(LoadUpdate)],   replica -> every router
            [b"report", encode_report(EngineReport)]
    DEALER  [b"snapshot"]  ->  [head, hashes] = encode_snapshot(Snapshot)  router <-> one replica's ROUTER

One that leaves the membership computes what it has for a while: what of it ends is heard until it has gone.

Knows endpoints and bytes; knows neither prompts nor which replica is best. A replica that cannot be
reached or talks nonsense costs its own prefix data, nothing else: tasks here end only by `aclose`.
Owner: the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from zmq.asyncio import Context
from zmq.constants import DEALER, MAXMSGSIZE, RCVHWM
from zmq.error import ZMQError

from cache.engine_report import EngineReport, decode_report
from cache.errors import WireError
from cache.event_wire import MAX_BATCH_BYTES, MAX_SNAPSHOT_BYTES, decode_batch, decode_load, decode_snapshot
from cache.events import Snapshot
from cache.messages import ReplicaInfo
from cache.types import ReplicaId
from router.events.event_stream import EventCounters, EventSink, EventStream, ResyncReason
from router.events.frame_socket import FrameSocket, connected

TOPIC = b"kv"
LOAD_TOPIC = b"load"
REPORT_TOPIC = b"report"
SNAPSHOT_REQUEST = b"snapshot"

# A snapshot repairs the first such, and what the replica goes on doing wrong makes the next one.
_CONTRADICTED = (ResyncReason.DRIFT, ResyncReason.MALFORMED)

_MAX_QUEUED_BATCHES = 10_000  # in the socket; beyond it ZMQ drops, which shows as a gap

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EventStatistics:
    """What became of the replicas' messages, for metrics and tests."""

    counters: EventCounters  # of all replicas since the start; live: do not keep
    lag_s: Mapping[ReplicaId, float]  # of each replica's latest batch
    reports: Mapping[ReplicaId, EngineReport]  # each replica's latest; none yet from one that just came


@dataclass(frozen=True, slots=True)
class SubscriberSettings:
    """How patiently snapshots are fetched."""

    snapshot_timeout_s: float = 5.0  # a snapshot of a million blocks takes well under a second
    resync_interval_s: float = 0.2  # at least this long between two requests to one replica
    max_resync_interval_s: float = 5.0  # failed requests double the interval up to this
    gone_after_s: float = 30.0  # without a word of one that leaves; while it computes it says some a second


class Subscriber:
    """One replica's events, from its sockets into the sink. `start` once, `aclose` any number of times."""

    def __init__(
        self,
        replica_id: ReplicaId,
        info: ReplicaInfo,
        sink: EventSink,
        context: Context,
        settings: SubscriberSettings,
        counters: EventCounters,
        turn: asyncio.Lock,
    ) -> None:
        """turn: held while a snapshot is applied, so that many at once take no more of the event loop."""
        self._replica_id = replica_id
        self._info = info
        self._context = context
        self._settings = settings
        self._turn = turn
        self._complaints: set[str] = set()  # logged, and nothing of that kind was good since
        self.report: EngineReport | None = None  # the latest one
        self._stream = EventStream(replica_id, sink, counters=counters)
        self._snapshot_wanted = asyncio.Event()
        self._events: FrameSocket | None = None
        self._resyncing: asyncio.Task[None] | None = None

    @property
    def is_synced(self) -> bool:
        """Whether a snapshot is in and no later batch is missing."""
        return not self._stream.needs_snapshot

    @property
    def lag_s(self) -> float:
        """Of the latest batch applied, from publication to application."""
        return self._stream.lag.last_s

    def start(self) -> None:
        """Subscribe, then ask for a snapshot. Raises ZMQError if the endpoint is not one."""
        self._events = FrameSocket(
            self._context,
            self._info.event_endpoint,
            (TOPIC, LOAD_TOPIC, REPORT_TOPIC),
            self._on_frames,
            replica_id=self._replica_id,
            options={MAXMSGSIZE: MAX_BATCH_BYTES, RCVHWM: _MAX_QUEUED_BATCHES},
        )
        self._stream.start()
        self._snapshot_wanted.set()
        self._resyncing = asyncio.create_task(self._resync(), name=f"snapshots of {self._replica_id}")

    def resync(self) -> None:
        """Fetch a snapshot although no batch is missing: what is indexed of this replica is in doubt."""
        self._stream.doubt()
        self._snapshot_wanted.set()

    def leave(self) -> None:
        """Its cache is nobody's any more: from now on only its load is heard."""
        self._stream.leave()
        if self._resyncing is not None:
            self._resyncing.cancel()

    async def until_gone(self) -> None:
        """Returns once one that leaves has said nothing for `gone_after_s`."""
        num_before = -1
        while num_before != self._stream.num_last_words:
            num_before = self._stream.num_last_words
            await asyncio.sleep(self._settings.gone_after_s)

    async def aclose(self) -> None:
        """Stop asking and listening. Idempotent."""
        if self._events is not None:
            self._events.close()
        if self._resyncing is not None:
            self._resyncing.cancel()
            await asyncio.gather(self._resyncing, return_exceptions=True)

    def _on_frames(self, frames: list[bytes]) -> None:
        if frames[0] == REPORT_TOPIC:
            self._take_report(frames)
            return
        try:
            self._feed(frames)
        except WireError as error:
            self._complain("malformed event", error)
            self._stream.feed_malformed()
        else:
            self._complaints.discard("malformed event")
        if self._stream.needs_snapshot:
            self._snapshot_wanted.set()

    def _take_report(self, frames: list[bytes]) -> None:
        """Totals for metrics: one that cannot be read makes no gap in what is known of the cache."""
        try:
            if len(frames) != 2:
                raise WireError(f"a report in {len(frames)} frames, not 2")
            report = decode_report(frames[1])
        except WireError as error:
            self._complain("malformed report", error)
            return
        self._complaints.discard("malformed report")
        if self.report is None or report.epoch != self.report.epoch or report.number > self.report.number:
            self.report = report

    def _feed(self, frames: list[bytes]) -> None:
        match frames:
            case [topic, wire] if topic == TOPIC:
                batch = decode_batch(wire)
                _check_capacity(batch.digest.count, self._info)
                self._stream.feed_batch(batch)
            case [topic, wire] if topic == LOAD_TOPIC:
                self._stream.feed_load(decode_load(wire))
            case _:
                raise WireError(f"{len(frames)} frames, not a topic and a message")

    async def _resync(self) -> None:
        """Fetch snapshots while they are wanted, never faster than the settings allow.

        One that what comes after it contradicts is wanted again at once, and will be contradicted again: that
        counts as failed, unless it went well for a while.
        """
        least_s, most_s = self._settings.resync_interval_s, self._settings.max_resync_interval_s
        interval_s, clock, has_come = least_s, asyncio.get_running_loop().time, True
        while True:
            began_at = clock()
            await self._snapshot_wanted.wait()
            self._snapshot_wanted.clear()
            if not self._stream.needs_snapshot:
                continue
            has_helped = self._stream.reason not in _CONTRADICTED or clock() - began_at >= most_s
            if has_come and has_helped:
                interval_s = least_s
            has_come = await self._try_snapshot()
            await asyncio.sleep(interval_s)
            interval_s = min(2 * interval_s, most_s)
            if self._stream.needs_snapshot:
                self._snapshot_wanted.set()

    async def _try_snapshot(self) -> bool:
        try:
            snapshot = decode_snapshot(await self._fetch_snapshot())
            _check_capacity(len(snapshot.hashes), self._info)
            await self._apply(snapshot)
        except TimeoutError as error:
            self._complain("no snapshot", error)
            return False
        except WireError as error:
            self._complain("malformed snapshot", error)
            self._stream.feed_malformed()
            return False
        except Exception:
            logger.exception("snapshot failed", extra={"replica_id": self._replica_id})
            return False
        self._complaints -= {"no snapshot", "malformed snapshot"}
        return True

    async def _apply(self, snapshot: Snapshot) -> None:
        """Slice by slice, requests in between: however large it is, none waits for all of it."""
        async with self._turn:
            for _ in self._stream.snapshot_slices(snapshot):
                await asyncio.sleep(0)

    async def _fetch_snapshot(self) -> list[memoryview]:
        """One request on a socket of its own: a late answer to an earlier one cannot be taken for it.

        The answer's frames where ZMQ has put them: copying eight megabytes would stop the event loop.
        """
        # zmq.asyncio.Socket; pyzmq's stubs cannot express its awaitables
        dealer = connected(
            self._context, DEALER, self._info.snapshot_endpoint, {MAXMSGSIZE: MAX_SNAPSHOT_BYTES}
        )
        try:
            async with asyncio.timeout(self._settings.snapshot_timeout_s):
                await dealer.send_multipart([SNAPSHOT_REQUEST])
                frames = await dealer.recv_multipart(copy=False)
        finally:
            dealer.close(linger=0)
        return [frame.buffer for frame in frames]

    def _complain(self, message: str, error: Exception) -> None:
        """Once until what is wrong is heard well again: a replica of another version says it for ever."""
        if message not in self._complaints:
            self._complaints.add(message)
            logger.warning(message, extra={"replica_id": self._replica_id, "detail": str(error)})


class SubscriberGroup:
    """The subscribers of all known replicas. An async context manager; `update` follows the membership."""

    def __init__(self, sink: EventSink, settings: SubscriberSettings | None = None) -> None:
        self._sink = sink
        self._settings = settings or SubscriberSettings()
        self._context = Context()
        self._subscribers: dict[ReplicaId, Subscriber] = {}
        self._leaving: dict[ReplicaId, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._counters = EventCounters()
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def update(self, replicas: Mapping[ReplicaId, ReplicaInfo]) -> None:
        """Listen to these replicas, and hear out those that left. Needs a running event loop; does not
        block."""
        if self._closed:
            return
        for replica_id in self._subscribers.keys() - replicas.keys():
            self._hear_out(replica_id, self._subscribers.pop(replica_id))
        for replica_id, info in replicas.items():
            if replica_id not in self._subscribers:
                if (leaving := self._leaving.pop(replica_id, None)) is not None:
                    leaving.cancel()
                self._open_one(replica_id, info)

    def is_synced(self, replica_id: ReplicaId) -> bool:
        subscriber = self._subscribers.get(replica_id)
        return subscriber is not None and subscriber.is_synced

    def resync(self, replica_id: ReplicaId) -> None:
        """What is indexed of this replica is in doubt: fetch a snapshot. Unknown replicas are ignored."""
        subscriber = self._subscribers.get(replica_id)
        if subscriber is not None:
            subscriber.resync()

    def all_synced(self) -> bool:
        """Whether every replica listened to has its snapshot in; True when there is none."""
        return all(subscriber.is_synced for subscriber in self._subscribers.values())

    def statistics(self) -> EventStatistics:
        """O(replicas)."""
        subscribers = self._subscribers.items()
        return EventStatistics(
            self._counters,
            lag_s={name: subscriber.lag_s for name, subscriber in subscribers},
            reports={name: s.report for name, s in subscribers if s.report is not None},
        )

    async def aclose(self) -> None:
        """Close every subscriber and the sockets' context. Idempotent."""
        self._closed = True
        for subscriber in self._subscribers.values():
            self._close_later(subscriber)
        self._subscribers.clear()
        for leaving in self._leaving.values():
            leaving.cancel()
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)
        self._context.destroy(linger=0)

    def _open_one(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        subscriber = Subscriber(
            replica_id, info, self._sink, self._context, self._settings, self._counters, self._turn
        )
        try:
            subscriber.start()
        except ZMQError as error:
            # Routed by load alone; asked again with the next membership change.
            logger.warning(
                "cannot subscribe",
                extra={"replica_id": replica_id, "detail": f"{info.event_endpoint}: {error}"},
            )
            return
        self._subscribers[replica_id] = subscriber

    def _hear_out(self, replica_id: ReplicaId, subscriber: Subscriber) -> None:
        """What ends of the streams that it goes on with, until it has gone or is cancelled."""

        def close(task: asyncio.Task[None]) -> None:
            if self._leaving.get(replica_id) is task:
                del self._leaving[replica_id]
            self._closing.discard(task)
            self._close_later(subscriber)

        subscriber.leave()
        task = asyncio.create_task(subscriber.until_gone(), name=f"last words of {replica_id}")
        self._leaving[replica_id] = task
        self._closing.add(task)
        task.add_done_callback(close)

    def _close_later(self, subscriber: Subscriber) -> None:
        task = asyncio.create_task(subscriber.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _check_capacity(num_hashes: int, info: ReplicaInfo) -> None:
    """What bounds the index: a replica caches no more hashes than it has blocks, in pool and host memory."""
    num_blocks = info.num_blocks + info.num_host_blocks
    if num_hashes > num_blocks:
        raise WireError(f"{num_hashes} hashes from a cache of {num_blocks} blocks")
