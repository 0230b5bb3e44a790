"""KV events out of the process: PUB for batches, ROUTER for snapshots, both on one thread.

    engine thread -- publish(batch) --> queue --> publisher thread --> PUB     [b"kv", encode(EventBatch)]
                                                        ^ |
                                        [b"snapshot"]   | +--------> ROUTER  [identity, encode(Snapshot)]

The thread keeps its own set of hashes, moved on by each batch as it is sent: so a snapshot shows the cache
exactly after the batch sent last, is answered while the engine is inside a long step, and no
state is shared with the engine thread.
Knows sockets and bytes; knows no blocks and no requests. Never unpickles.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from typing import Any

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

from cache.events import FORMAT_VERSION, EventBatch, Load, Snapshot, encode
from cache.types import HashHint
from replica.errors import EventSocketError

TOPIC = b"kv"
SNAPSHOT_REQUEST = b"snapshot"

MAX_QUEUED_BATCHES = 10_000  # per subscriber; a slower one loses batches, sees the gap, asks for a snapshot
MAX_QUEUED_SNAPSHOTS = 16  # per asking router, which waits for one before it asks again
MAX_REQUEST_BYTES = 1024  # ZMQ drops the connection of whoever sends more

_WAKE = b""

logger = logging.getLogger(__name__)


def new_epoch() -> int:
    """Names one life of one engine's cache: random, so that a restart never repeats one."""
    return secrets.randbits(64)


class Publisher:
    """Binds when built, so that the endpoints are known; sends between `start` and `close`."""

    def __init__(self, *, host: str, port: int, epoch: int) -> None:
        """port: 0 for two free ones, else PUB listens on `port` and snapshots on `port + 1`.

        Raises EventSocketError when they cannot listen there.
        """
        self._epoch = epoch
        self._context: Any = Context()
        try:
            self._pub = self._bind(PUB, host, port, {SNDHWM: MAX_QUEUED_BATCHES})
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
        self._batches: queue.SimpleQueue[EventBatch | None] = queue.SimpleQueue()
        # Publisher thread only.
        self._hashes: dict[HashHint, None] = {}  # in order of storing: parents before children
        self._seq = 0
        self._load = Load()
        self._thread = threading.Thread(target=self._run, name="warmpath-publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def publish(self, batch: EventBatch) -> None:
        """Hand over the next batch, in order of `seq`. One thread only; never blocks."""
        self._batches.put(batch)
        self._wake()

    def close(self) -> None:
        """Stop the thread and close every socket. May be called twice."""
        with self._wake_lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._batches.put(None)
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
            ready = dict(poller.poll())
            try:
                if self._wake_in in ready:
                    self._drain_wake()
                    if not self._send_batches():
                        return
                if self._router in ready:
                    self._answer()
            except ContextTerminated:
                return
            except Exception:
                # Events are a hint: losing one shows as a gap, losing the thread would lose them all.
                logger.exception("event publisher failed, going on")

    def _drain_wake(self) -> None:
        while True:
            try:
                self._wake_in.recv(NOBLOCK)
            except Again:
                return

    def _send_batches(self) -> bool:
        """Send what is queued; False when told to stop."""
        while True:
            try:
                batch = self._batches.get_nowait()
            except queue.Empty:
                return True
            if batch is None:
                return False
            self._apply(batch)
            self._pub.send_multipart([TOPIC, encode(batch)])

    def _apply(self, batch: EventBatch) -> None:
        assert batch.seq == self._seq + 1, "batches are published in order"
        for name in batch.removed:
            del self._hashes[name]
        self._hashes.update(dict.fromkeys(batch.stored))
        self._seq, self._load = batch.seq, batch.load

    def _answer(self) -> None:
        """Answer one request. Whoever asks anything else gets no answer."""
        frames = self._router.recv_multipart(NOBLOCK)
        if len(frames) != 2 or frames[1] != SNAPSHOT_REQUEST:
            logger.warning("not a snapshot request, ignored", extra={"num_frames": len(frames)})
            return
        snapshot = Snapshot(FORMAT_VERSION, self._epoch, self._seq, tuple(self._hashes), self._load)
        self._router.send_multipart([frames[0], encode(snapshot)], NOBLOCK)


def _endpoint(socket: Any) -> str:
    return str(socket.getsockopt_string(LAST_ENDPOINT))
