"""What the engine tells of itself, and when: batches for routers, reports for metrics.

    somebody came, ended or was given back ──> at once ──────────┐
    the cache changed, by prompts ──> after the step ────────────┼──> EventBatch, with the load
    work goes on ──> every 10 ms, every 50 while it only decodes ┤
    nothing happens ──> a heartbeat ─────────────────────────────┘
    pins changed, or half a second has passed ──> EngineReport

Knows the engine's core and a clock; knows neither threads nor sockets. Engine thread only, but for `load`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cache.engine_report import EngineReport
from cache.event_log import EventLog
from cache.events import MAX_ADMITTED_PER_BATCH, MAX_ENDED_PER_BATCH, EventBatch, Load, RequestEnded
from cache.types import RequestId
from replica.engine.engine_core import EngineCore
from replica.engine.engine_stats import EngineStats

# With work to do, routers hear of the load at the first step's end after this: never more than 20 ms late
# where steps take 10.
LOAD_INTERVAL_S = 0.01
# While every sequence only decodes, the load hardly changes, and what enters the cache is wanted when an
# answer has ended: telling of each step would cost a Router more than passing the answers on.
DECODE_LOAD_INTERVAL_S = 0.05
REPORT_INTERVAL_S = 0.5  # between two reports for metrics, which are scraped every few seconds


class Bulletins:
    """One engine's. Told what happens, it publishes and reports when that is due."""

    def __init__(
        self,
        core: EngineCore,
        *,
        events: EventLog | None,
        publish: Callable[[EventBatch], None] | None,
        report: Callable[[EngineReport], None] | None,
        heartbeat_interval_s: float,
        clock: Callable[[], float],
    ) -> None:
        """events: the core's sink. publish and report may not block; None: nobody hears of it."""
        self._core = core
        self._events = events
        self._publish = publish
        self._report = report
        self._heartbeat_interval_s = heartbeat_interval_s
        self._clock = clock
        self._admitted: list[RequestId] = []  # taken in since the last batch
        self._ended: list[RequestEnded] = []  # of those taken in, since the last batch
        self._has_news = False  # something ended since the last batch
        self._is_draining = False
        self._published_s = -float("inf")
        self._published_tokens = 0  # prompt tokens that routers were told are left to compute
        self._reported_s = -float("inf")
        self._num_reports = 0
        self._reported_pins = 0  # version of what the last report told of pins
        # Written by the engine thread, read by anyone: immutable values, replaced whole.
        self._load, self._stats = core.load(), core.stats()

    @property
    def load(self) -> Load:
        """As of the last step or batch; of the last batch while all sequences only decode. Any thread."""
        return self._load

    @property
    def stats(self) -> EngineStats:
        """As of the same moment. Any thread."""
        return self._stats

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    # -- what has happened ------------------------------------------------------------------------

    def admitted(self, request_id: RequestId) -> None:
        """A request was taken in: the next batch names it."""
        self._admitted.append(request_id)

    def ended(self, request: RequestEnded) -> None:
        """A request that was taken in is computed no more: the next batch names it, and need not wait."""
        self._ended.append(request)
        self._has_news = True

    def changed(self) -> None:
        """A request ended, or a pin changed: the next batch need not wait."""
        self._has_news = True

    def drains(self) -> None:
        """No new requests are wanted from now on."""
        self._is_draining = self._has_news = True

    def stepped(self) -> None:
        """A step is over: what it has changed is looked at, unless that was another token for everybody."""
        if self._has_news or self._core.num_waiting or not self._only_decodes():
            self._look()

    # -- what is told of it -----------------------------------------------------------------------

    def until_heartbeat_s(self) -> float:
        """Seconds until something has to be told even if nothing happens."""
        due_s = self._published_s + self._heartbeat_interval_s
        return min(max(0.0, due_s - self._clock()), self._heartbeat_interval_s)

    def publish_if_due(self) -> None:
        """One batch when something changed, or a heartbeat when nothing did for a while; several where one
        does not hold it all."""
        now_s = self._clock()
        if self._is_due(now_s):
            self._published_s = now_s
            self._has_news = False
            self._publish_all()

    def report_if_due(self) -> None:
        """One report when pins have changed, or `REPORT_INTERVAL_S` has passed; none if nobody hears it."""
        now_s, pins = self._clock(), self._core.pins.version
        is_due = pins != self._reported_pins or now_s - self._reported_s >= REPORT_INTERVAL_S
        if self._report is None or not is_due:
            return
        self._reported_s, self._reported_pins = now_s, pins
        self._num_reports += 1
        epoch = self._events.epoch if self._events is not None else 0
        self._report(self._core.report(epoch=epoch, number=self._num_reports))

    def _is_due(self, now_s: float) -> bool:
        """With work to do the load changes even where the cache does not: that while is short then."""
        if self._admitted or self._has_news:
            return True
        only_decodes = self._only_decodes()
        if self._events is not None and self._events.has_changes and not only_decodes:
            return True
        interval_s = self._heartbeat_interval_s
        if self._core.has_work:
            interval_s = min(interval_s, DECODE_LOAD_INTERVAL_S if only_decodes else LOAD_INTERVAL_S)
        return now_s - self._published_s >= interval_s

    def _publish_all(self) -> None:
        while True:
            admitted = tuple(self._admitted[:MAX_ADMITTED_PER_BATCH])
            ended = tuple(self._ended[:MAX_ENDED_PER_BATCH])
            del self._admitted[:MAX_ADMITTED_PER_BATCH], self._ended[:MAX_ENDED_PER_BATCH]
            self._look(admitted, ended)
            self._published_tokens = self._load.queued_uncached_tokens
            if self._events is None:
                return
            batch = self._events.flush(self._load)
            if self._publish is not None:
                self._publish(batch)
            if not (self._events.has_changes or self._admitted or self._ended):
                return

    def _only_decodes(self) -> bool:
        """Whether no prompt is left to compute, and routers know it, with the blocks of the last one."""
        return self._core.has_work and not (self._published_tokens or self._load.queued_uncached_tokens)

    def _look(self, admitted: tuple[RequestId, ...] = (), ended: tuple[RequestEnded, ...] = ()) -> None:
        load = self._core.load(admitted)
        if ended or self._is_draining:
            load = msgspec.structs.replace(load, ended=ended, is_draining=self._is_draining)
        self._load = load
        self._stats = self._core.stats()
