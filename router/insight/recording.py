"""The Router's own traffic as a trace that a simulation can replay: times, lengths, keyed block ids.

    {"format": "warmpath-trace", "version": 2, "recording": …, "key": …, "part": 1, "started_at": …, …}
    {"t": 12.25, "input": 812, "output": 64, "blocks": ["9f…", …], "block_size": 16, "session": "…"}
    {"t": 12.5, "input": 90, "refused": true, "blocks": ["9f…", …], "block_size": 16}
    {"t": 13.0, "input": 90, "n": 2, "outputs": [64, 21], "blocks": ["9f…", …], "block_size": 16}

One line per request, written when it ends, also for one that no replica was found for: what came is what a
fleet has to be planned for, and in overload much of it is refused. So lines are not in order of `t`, seconds
since the recording began. `blocks` are the prompt's full blocks, each id standing for everything up to there.
No text, no token and no block hash is written: ids are keyed with a secret that is in no file, so a trace
tells which prompts share how much, and nobody can look up a guess. The header's `key` is a name of that
secret, which gives nothing of it away: ids of two names have nothing to do with each other.

The event loop only puts a row into a bounded queue; a thread makes ids, writes and rotates. A full queue or
a full disk loses rows and counts them; requests never wait.
Knows queries and hints; knows neither HTTP nor replicas, and files by `trace_files.py` alone.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from cache.types import HashHint, RequestId
from router.config import RecordConfig
from router.insight.trace_files import TraceFiles, as_line
from router.placement.decision import DecisionRecord, RouteQuery
from router.placement.observer import SilentObserver

FORMAT = "warmpath-trace"
VERSION = 2
_ID_BYTES = 8  # 16 hexadecimal digits: no two blocks of a recording share an id but by a rare chance
_MAX_QUEUED = 1024  # rows; a busy second
_MAX_UNFLUSHED = 256  # rows: what a killed process loses at most
_RETRY_S = 10.0  # after an error, before the next file is begun
_CLOSE_LIMIT_S = 10.0

logger = logging.getLogger(__name__)


class Row(NamedTuple):
    """One request that is over."""

    time_s: float  # since the recording began
    num_input_tokens: int
    n: int  # answers asked for
    answers: Sequence[int] | None  # tokens of each; None: refused, so nobody knows
    hints: Sequence[HashHint]  # of the input's full blocks
    session: str | None  # which requests are one conversation, as the client says


@dataclass(slots=True)
class RecordingTotals:
    """Rows since the start. Numbers of the writing thread, read without a lock: each is one int."""

    written: int = 0
    dropped: int = 0  # the queue was full
    failed: int = 0  # the file could not be written
    lost: int = 0  # of those written: somebody deleted the file before its end


class BlockIds:
    """Names for blocks and sessions that mean nothing without the key."""

    def __init__(self, key: bytes) -> None:
        """key: 16 to 64 bytes."""
        self._keyed = hashlib.blake2b(key=key, digest_size=_ID_BYTES)

    @property
    def key_name(self) -> str:
        """The same for the same key."""
        return self._name(b"key")

    def block(self, hint: HashHint) -> str:
        """16 hexadecimal digits, as all of them."""
        return self._name(b"block" + hint.to_bytes(8, "little"))

    def session(self, name: str) -> str:
        return self._name(b"session" + name.encode("utf-8", "surrogatepass"))

    def _name(self, text: bytes) -> str:
        keyed = self._keyed.copy()  # half the cost of keying anew
        keyed.update(text)
        return keyed.hexdigest()


class TrafficRecorder(SilentObserver):
    """Writes every request that came, once it is over. `start` once, `close` any number of times."""

    def __init__(
        self,
        config: RecordConfig,
        *,
        block_size: int,
        model_name: str,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.totals = RecordingTotals()
        self._clock = clock
        self._began_at = clock()
        self._block_tokens = config.block_tokens or block_size
        self._stride = self._block_tokens // block_size
        secret = config.read_key() or secrets.token_bytes(32)
        # Any length of secret; a digest, so that the key in memory is not the one in the settings.
        self._ids = BlockIds(hashlib.sha256(b"warmpath trace" + secret).digest())
        recording, started_at = secrets.token_hex(4), wall_clock()
        when = datetime.fromtimestamp(started_at, UTC)
        self._files = TraceFiles(
            config,
            header={
                "format": FORMAT,
                "version": VERSION,
                "recording": recording,
                "key": self._ids.key_name,
                "started_at": started_at,
                "model": model_name,
                "block_size": self._block_tokens,
            },
            stem=f"traffic-{when:%Y%m%dT%H%M%SZ}-{recording}",
        )
        self._open: dict[RequestId, Row] = {}  # decided and not over; without their output
        self._rows: queue.Queue[Row | None] = queue.Queue(_MAX_QUEUED)  # None: the last one
        self._thread: threading.Thread | None = None
        # Of the thread alone:
        self._num_unflushed = 0
        self._is_broken = False  # the last write failed
        self._retry_at = float("-inf")

    @property
    def path(self) -> Path:
        """Of the file being written."""
        return self._files.path

    def start(self) -> None:
        """Raises ConfigError if the folder cannot be written to."""
        self._files.prepare()
        self._thread = threading.Thread(target=self._write_all, name="traffic recorder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is queued, end the thread. Blocks, seconds at worst. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with suppress(queue.Full):  # a disk that hangs must not keep the process
            self._rows.put(None, timeout=_CLOSE_LIMIT_S)
        thread.join(_CLOSE_LIMIT_S)

    # --- RoutingObserver, on the event loop ---------------------------------------------------

    def decided(self, record: DecisionRecord, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        if query.request_id in self._open:
            return  # a retry: the request came once
        self._open[query.request_id] = self._row(query, hints, record.decided_at)

    def finished(self, request_id: RequestId, hints: Sequence[HashHint], answers: Sequence[int]) -> None:
        row = self._open.pop(request_id, None)
        if row is not None:
            self._put(row._replace(answers=answers))

    def refused(self, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        if query.request_id not in self._open:  # else only a retry was, and the end is yet to be told
            self._put(self._row(query, hints, self._clock()))

    def _row(self, query: RouteQuery, hints: Sequence[HashHint], now: float) -> Row:
        asked_at = query.asked_at if query.asked_at is not None else now
        return Row(
            time_s=max(0.0, asked_at - self._began_at),
            num_input_tokens=query.num_prompt_tokens,
            n=query.n,
            answers=None,
            hints=hints,
            session=f"{query.cache_salt}\n{query.session}" if query.session is not None else None,
        )

    def _put(self, row: Row) -> None:
        if self._thread is None:
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self.totals.dropped += 1

    # --- the thread ---------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (row := self._rows.get()) is not None:
            self._write(row)
            if self._rows.empty() or self._num_unflushed >= _MAX_UNFLUSHED:
                self._flush()
        self._flush()
        with suppress(OSError):
            self._files.close()
        self.totals.lost = self._files.num_lost

    def _write(self, row: Row) -> None:
        if self._clock() < self._retry_at:
            self.totals.failed += 1
            return
        self._num_unflushed += 1
        try:
            self._files.write(self._encode(row))
        except OSError as error:
            self._fail(error)

    def _flush(self) -> None:
        try:
            self._files.flush()
        except OSError as error:
            self._fail(error)
            return
        self.totals.written += self._num_unflushed
        self.totals.lost = self._files.num_lost
        if self._num_unflushed and self._is_broken:
            self._is_broken = False
            logger.info("the recording is written again")
        self._num_unflushed = 0

    def _fail(self, error: OSError) -> None:
        """A disk that is full now may have room in a while. Said once per change of state, counted always."""
        self._files.abandon()
        self.totals.failed += self._num_unflushed
        self._num_unflushed = 0
        self._retry_at = self._clock() + _RETRY_S
        if not self._is_broken:
            self._is_broken = True
            logger.warning("the recording cannot be written", extra={"detail": error.strerror})

    def _encode(self, row: Row) -> bytes:
        blocks = [self._ids.block(hint) for hint in row.hints[self._stride - 1 :: self._stride]]
        if not blocks:  # a prompt that is scored has no hashes: what it has is nobody else's
            blocks = [secrets.token_hex(_ID_BYTES) for _ in range(row.num_input_tokens // self._block_tokens)]
        fields: dict[str, Any] = {
            "t": round(row.time_s, 6),
            "input": row.num_input_tokens,
            **({} if row.n == 1 else {"n": row.n}),
            **_came_of_it(row),
            "blocks": blocks,
            "block_size": self._block_tokens,
        }
        if row.session is not None:
            fields["session"] = self._ids.session(row.session)
        return as_line(fields)


def _came_of_it(row: Row) -> dict[str, Any]:
    if row.answers is None:
        return {"refused": True}
    return {"output": sum(row.answers)} if row.n == 1 else {"outputs": list(row.answers)}
