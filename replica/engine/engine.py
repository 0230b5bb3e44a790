"""The engine on its own thread: asyncio posts requests, the thread computes steps, deltas come back.

    event loop thread                          engine thread                     publisher thread
    generate() -- inbox: submit, cancel -----> take in, step, coalesce --------> EventBatch
      | ^----- loop.call_soon_threadsafe <---- one parcel of deltas per step
      +------- door: arrived ---------------------------------------------------> LoadUpdate

All engine state belongs to the engine thread. Knows asyncio and threads; knows neither sockets nor Ray.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from cache.block_hash import hints
from cache.engine_report import EngineReport
from cache.errors import HandedOver
from cache.events import MAX_ADMITTED_PER_BATCH, EventBatch, EventLog, Load
from cache.messages import Delta, GenerateRequest, HeldPrefix
from cache.types import PinId, RequestId
from replica.config import ReplicaConfig
from replica.engine.arrivals import Arrival
from replica.engine.completion import Completion
from replica.engine.engine_core import EngineCore, EngineStats, Progress
from replica.engine.outbox import Outbox
from replica.engine.pins import EnginePins
from replica.engine.request_watch import RequestWatcher
from replica.engine.stream import DeltaStream
from replica.engine.watchdog import Watchdog
from replica.errors import EngineStopped, RequestRefused
from replica.scheduling.request import Request
from replica.structures.matcher import StructureMatcher

__all__ = ["Completion", "Engine", "EngineCore", "EngineStats", "Progress"]

# With work to do, routers hear of the load at the first step's end after this: never more than 20 ms late
# where steps take 10.
LOAD_INTERVAL_S = 0.01
# While every sequence only decodes, the load hardly changes, and what enters the cache is wanted when an
# answer has ended: telling of each step would cost a Router more than passing the answers on.
DECODE_LOAD_INTERVAL_S = 0.05
# A step over long contexts, on a busy machine, takes several times as long as a full one did at the start.
FULL_STEPS = 8
OUTSIDE_STEP_LIMIT_S = 8.0  # for what takes no time: beyond it the engine thread is stuck there
REPORT_INTERVAL_S = 0.5  # between two reports for metrics, which are scraped every few seconds

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


class Door(Protocol):
    """Hears of requests before the engine thread, which may be inside a step. Any thread; never blocks."""

    def arrived(self, arrival: Arrival) -> None:
        """It is about to be posted; a batch will name it, or `refused` is called."""

    def refused(self, request_id: RequestId) -> None:
        """It will not be served."""

    def draining(self) -> None:
        """No new requests are wanted; a batch will say so, too."""


@dataclass(frozen=True, slots=True)
class _Submit:
    request: GenerateRequest
    stream: DeltaStream
    arrival_s: float
    structure: StructureMatcher | None  # the request's, compiled


@dataclass(frozen=True, slots=True)
class _Cancel:
    stream: DeltaStream


@dataclass(frozen=True, slots=True)
class _AskPins(Generic[_Answer]):
    question: Callable[[EnginePins], _Answer]
    answer: Future[_Answer]


@dataclass(frozen=True, slots=True)
class _Drain:
    pass


@dataclass(frozen=True, slots=True)
class _HandOver:
    pass


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Message = _Submit | _Cancel | _AskPins[Any] | _Drain | _HandOver | _Stop


class Engine:
    """Serves `generate` calls from one event loop or several. `start` before, `aclose` after."""

    def __init__(
        self,
        core: EngineCore,
        config: ReplicaConfig,
        *,
        events: EventLog | None = None,
        publish: Callable[[EventBatch], None] | None = None,
        report: Callable[[EngineReport], None] | None = None,
        door: Door | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_hang: Callable[[], None] | None = None,
        on_death: Callable[[], None] | None = None,
    ) -> None:
        """events: the log that is also the core's sink. publish: takes its batches, report: what
        metrics tell of the engine; neither may block.
        clock: the core's own. on_hang: instead of ending the process, for tests.
        on_death: called on the engine thread when it dies of a bug, once the cause is logged; None: requests
        are refused from then on, and `check_health` says why."""
        self._core = core
        self._config = config
        self._events = events
        self._publish = publish
        self._tell_report = report
        self._door = door
        self._clock = clock
        self._on_death = on_death
        self._watchdog = Watchdog(
            clock=clock, poll_interval_s=min(1.0, config.step_time_limit_s / 4), on_hang=on_hang
        )
        self._thread = threading.Thread(target=self._run, name="warmpath-engine", daemon=True)
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._inbox_lock = threading.Lock()  # guards `_stop_reason` together with putting into the inbox
        self._stop_reason: str | None = "it was not started"  # None while requests are taken
        self._is_ready = threading.Event()  # set after warm-up, or when it failed
        self._failure: BaseException | None = None  # what killed the engine thread
        self._step_limit_s = config.step_time_limit_s  # written while it warms up
        # Engine thread only, from here on.
        self._outbox = Outbox(config.stream_interval_s)
        self._admitted: list[RequestId] = []  # taken in since the last batch
        self._has_news = False  # something ended since the last batch
        self._is_draining = False
        self._hands_over = False  # whatever is here or comes is for another replica
        self._published_s = -float("inf")
        self._published_tokens = 0  # prompt tokens that routers were told are left to compute
        self._reported_s = -float("inf")
        self._num_reports = 0
        self._reported_pins = 0  # version of what the last report told of pins
        # Written by the engine thread, read by anyone: immutable values, replaced whole.
        self._load = core.load()
        self._stats = core.stats()

    # -- any thread -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine thread and wait until the runner is warm. Raises what warm-up raised."""
        self._watchdog.start()
        self._stop_reason = None
        self._thread.start()
        self._is_ready.wait()
        if self._failure is not None:
            self._watchdog.close()
            raise self._failure

    def load(self) -> Load:
        """The load as of the last step or batch."""
        return self._load

    def stats(self) -> EngineStats:
        """Counters as of the last step."""
        return self._stats

    def watch(self, watcher: RequestWatcher) -> None:
        """Tell `watcher`, on the engine thread, of every request's end from now on."""
        self._core.watch(watcher)

    def check_health(self) -> None:
        """Raises EngineStopped when the engine can serve nothing any more."""
        if self._stop_reason is not None or not self._thread.is_alive():
            raise EngineStopped(self._stop_reason or "its thread has died") from self._failure

    def drain(self) -> None:
        """Tell routers to send nothing new; who comes all the same is served. Any thread; idempotent."""
        if self._door is not None:
            self._door.draining()  # at once: the engine thread may be inside a step
        self._post(_Drain())

    def hand_over(self) -> None:
        """End what is in flight, and whatever comes, with HandedOver: another replica goes on with it from
        the tokens it has. After the present step; any thread; idempotent."""
        self._post(_HandOver())

    def close(self, timeout_s: float | None = None) -> None:
        """Stop after the present step; requests in flight end with EngineStopped. May be called twice.

        timeout_s: how long to wait for that step; None = the step time limit.
        """
        self._post(_Stop())
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(self._step_limit_s if timeout_s is None else timeout_s)
        self._watchdog.close()

    # -- event loop threads -----------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Stream one generation: the first token at once, then what each `stream_interval_s` brought.

        Raises RequestRefused in one of its kinds. Closing or cancelling the generator cancels the
        request: its blocks are free after the step in progress.
        """
        stream = DeltaStream(asyncio.get_running_loop(), request.num_answers_left)
        arrival_s = self._clock()
        structure = await self._compiled(request)
        self._announce(request)
        if not self._post(_Submit(request, stream, arrival_s, structure)):
            self._withdraw(request.request_id)
            raise EngineStopped(self._stop_reason or "it is closing")
        try:
            while not stream.is_read:
                yield await stream.next()
        finally:
            if not stream.is_over:
                self._post(_Cancel(stream))

    async def unpin(self, pin_id: PinId) -> bool:
        """Give back what a pin holds here, after the present step; whether it held something.

        Raises EngineStopped: then nothing is held any more either.
        """
        return await self._ask_pins(lambda pins: pins.release(pin_id))

    async def inherit(self, pin_id: PinId, keeper: str, heir: str) -> HeldPrefix | None:
        """Let another Router keep what a pin holds here, after the present step; see `EnginePins.inherit`.

        Raises EngineStopped.
        """
        return await self._ask_pins(lambda pins: pins.inherit(pin_id, keeper, heir))

    async def _ask_pins(self, question: Callable[[EnginePins], _Answer]) -> _Answer:
        answer: Future[_Answer] = Future()
        if not self._post(_AskPins(question, answer)):
            raise EngineStopped(self._stop_reason or "it is closing")
        return await asyncio.wrap_future(answer)

    async def aclose(self) -> None:
        """`close` without blocking the event loop. May be called twice."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Engine:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _compiled(self, request: GenerateRequest) -> StructureMatcher | None:
        """Where its output begins in its structure: compiled here, since a step waits for nobody's."""
        if request.structure is None:
            return None
        minimum = request.sampling.min_tokens
        return await self._core.structures.begin_soon(request.structure, min_tokens=minimum)

    def _announce(self, request: GenerateRequest) -> None:
        if self._door is not None:
            self._door.arrived(
                Arrival(
                    request.request_id,
                    len(request.token_ids),
                    hints(request.block_hashes),
                    self._config.block_size,
                )
            )

    def _withdraw(self, request_id: RequestId) -> None:
        if self._door is not None:
            self._door.refused(request_id)

    def _post(self, message: _Message) -> bool:
        """Put a message where the engine thread will find it; False when it takes none any more."""
        with self._inbox_lock:
            if self._stop_reason is not None:
                return False
            if isinstance(message, _Stop):
                self._stop_reason = "it was closed"
            self._inbox.put(message)
            return True

    # -- engine thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._warm_up()
            while self._is_staying():
                self._core.pins.expire()
                self._publish_if_due()  # before the step: routers should know who has arrived
                self._step()
                self._report_if_due()  # before the answers: whoever is told of a pin finds it everywhere
                self._drop(self._outbox.deliver())
                self._publish_if_due()
        except BaseException as error:
            self._failure = error
            logger.critical("engine thread died", exc_info=error)
            if self._on_death is not None and self._is_ready.is_set():
                self._on_death()
        finally:
            self._end_everything()

    def _warm_up(self) -> None:
        self._watchdog.begin("warm-up", self._config.warm_up_time_limit_s)
        full_step_s = self._core.warm_up()
        self._watchdog.end()
        if FULL_STEPS * full_step_s > self._step_limit_s:
            self._step_limit_s = FULL_STEPS * full_step_s
            logger.warning(
                "full steps take long here, and so does finding a hung one",
                extra={"full_step_s": round(full_step_s, 2), "limit_s": round(self._step_limit_s, 1)},
            )
        self._is_ready.set()

    def _is_staying(self) -> bool:
        """Take in what was posted, watched: a thread that never comes back from this serves nobody either."""
        self._watchdog.begin("taking requests in", self._config.heartbeat_interval_s + OUTSIDE_STEP_LIMIT_S)
        return self._take_inbox()

    def _take_inbox(self) -> bool:
        """Take in what was posted, waiting for something only while idle; False when told to stop."""
        try:
            message = self._inbox.get(timeout=self._idle_s())
            while True:
                match message:
                    case _Submit():
                        self._submit(message)
                    case _Cancel():
                        self._cancel(message)
                    case _AskPins():
                        self._answer_of_pins(message)
                    case _Drain():
                        self._is_draining = self._has_news = True
                    case _HandOver():
                        self._give_back()
                    case _Stop():
                        return False
                message = self._inbox.get_nowait()
        except queue.Empty:
            return True

    def _idle_s(self) -> float:
        """Seconds the engine may sleep: none with work to do, else until the next heartbeat."""
        if self._core.has_work:
            return 0.0
        due_s = self._published_s + self._config.heartbeat_interval_s
        return min(max(0.0, due_s - self._clock()), self._config.heartbeat_interval_s)

    def _submit(self, message: _Submit) -> None:
        try:
            if self._hands_over or (self._is_draining and message.request.pin is not None):
                raise HandedOver
            requests = self._core.take(
                message.request, arrival_s=message.arrival_s, structure=message.structure
            )
        except RequestRefused as error:
            self._withdraw(message.request.request_id)
            self._outbox.send(message.stream, error)
            return
        for request in requests:
            self._outbox.open(request, message.stream)
        self._admitted.append(message.request.request_id)

    def _cancel(self, message: _Cancel) -> None:
        self._drop(self._outbox.close(message.stream))

    def _answer_of_pins(self, message: _AskPins[Any]) -> None:
        version_before = self._core.pins.version
        answer = message.question(self._core.pins)
        if self._core.pins.version != version_before:
            self._has_news = True
            self._report_if_due()  # before the answer: whoever has it finds the change everywhere
        if message.answer.set_running_or_notify_cancel():
            message.answer.set_result(answer)

    def _give_back(self) -> None:
        self._hands_over = self._is_draining = self._has_news = True
        # What is computed already, nobody needs to do again.
        self._drop(self._outbox.close_all(HandedOver, sends_rest=True))

    def _step(self) -> None:
        if self._core.has_work:
            self._watchdog.begin("step", self._step_limit_s, self._outbox.request_ids)
            began_s = self._clock()
            progress = self._core.step()
            for entry in progress:
                self._has_news |= entry.is_last
                self._drop(self._outbox.record(entry))
            now_s = self._clock()
            self._outbox.send_due(now_s, now_s - began_s)
            self._load = self._load_now()
        self._stats = self._core.stats()

    def _drop(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._core.cancel(request.request_id)
            self._has_news = True

    def _publish_if_due(self) -> None:
        """One batch when something changed, or a heartbeat when nothing did for a while.

        With work to do the load changes even where the cache does not: that while is short then.
        """
        now_s, only_decodes = self._clock(), self._only_decodes()
        has_changes = self._events is not None and self._events.has_changes and not only_decodes
        interval_s = self._config.heartbeat_interval_s
        if self._core.has_work:
            interval_s = min(interval_s, DECODE_LOAD_INTERVAL_S if only_decodes else LOAD_INTERVAL_S)
        is_due = now_s - self._published_s >= interval_s
        if not (has_changes or self._admitted or self._has_news or is_due):
            return
        self._published_s = now_s
        self._has_news = False
        while True:
            admitted, self._admitted = (
                self._admitted[:MAX_ADMITTED_PER_BATCH],
                self._admitted[MAX_ADMITTED_PER_BATCH:],
            )
            self._load = self._load_now(tuple(admitted))
            self._published_tokens = self._load.queued_uncached_tokens
            if self._events is None:
                return
            batch = self._events.flush(self._load)
            if self._publish is not None:
                self._publish(batch)
            if not (self._events.has_changes or self._admitted):
                return

    def _only_decodes(self) -> bool:
        """Whether no prompt is left to compute, and routers know it, with the blocks of the last one."""
        return self._core.has_work and not (self._published_tokens or self._load.queued_uncached_tokens)

    def _load_now(self, admitted: tuple[RequestId, ...] = ()) -> Load:
        load = self._core.load(admitted)
        return msgspec.structs.replace(load, is_draining=True) if self._is_draining else load

    def _report_if_due(self) -> None:
        now_s, pins = self._clock(), self._core.pins.version
        is_due = pins != self._reported_pins or now_s - self._reported_s >= REPORT_INTERVAL_S
        if self._tell_report is None or not is_due:
            return
        self._reported_s, self._reported_pins = now_s, pins
        self._num_reports += 1
        epoch = self._events.epoch if self._events is not None else 0
        self._tell_report(self._core.report(epoch=epoch, number=self._num_reports))

    def _end_everything(self) -> None:
        """No request may wait for a thread that is gone."""
        with self._inbox_lock:
            self._stop_reason = self._stop_reason or "its thread has died"
        self._watchdog.end()
        reason = self._stop_reason
        self._outbox.close_all(lambda: EngineStopped(reason), sends_rest=False)
        while not self._inbox.empty():
            message = self._inbox.get_nowait()
            if isinstance(message, _Submit):
                self._outbox.send(message.stream, EngineStopped(reason))
            elif isinstance(message, _AskPins) and message.answer.set_running_or_notify_cancel():
                message.answer.set_exception(EngineStopped(reason))
        self._outbox.deliver()
        self._is_ready.set()
