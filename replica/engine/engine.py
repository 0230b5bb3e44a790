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
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from cache.block_hash import hints
from cache.engine_report import EngineReport
from cache.errors import HandedOver
from cache.event_log import EventLog
from cache.events import EventBatch, Load
from cache.messages import Delta, GenerateRequest, HeldPrefix
from cache.types import PinId, RequestId
from replica.config import ReplicaConfig
from replica.engine.arrivals import Arrival
from replica.engine.bulletins import Bulletins
from replica.engine.door import Door
from replica.engine.engine_core import EngineCore
from replica.engine.engine_stats import EngineStats
from replica.engine.inbox import Abandon, AskPins, Cancel, Drain, HandOver, Inbox, Message, Stop, Submit
from replica.engine.outbox import Outbox
from replica.engine.pins import EnginePins
from replica.engine.request_watch import RequestWatcher
from replica.engine.stream import DeltaStream
from replica.engine.watchdog import Watchdog
from replica.errors import EngineStopped, RequestRefused
from replica.scheduling.request import Request
from replica.structures.matcher import StructureMatcher

# A step over long contexts, on a busy machine, takes several times as long as a full one did at the start.
FULL_STEPS = 8
OUTSIDE_STEP_LIMIT_S = 8.0  # for what takes no time: beyond it the engine thread is stuck there
# Of the last step's time, that taking in what was posted may take before the next one while answers go on: so
# much longer a gap between two tokens gets in a flood of requests. With less it takes long to take them in.
INTAKE_SHARE = 0.25
# The same while none goes on: a burst is seen whole, so that short prompts go first, and a flood holds up
# nobody's prompt for longer.
INTAKE_LIMIT_S = 0.05

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


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
        self._door = door
        self._clock = clock
        self._on_death = on_death
        self._watchdog = Watchdog(
            clock=clock, poll_interval_s=min(1.0, config.step_time_limit_s / 4), on_hang=on_hang
        )
        self._thread = threading.Thread(target=self._run, name="warmpath-engine", daemon=True)
        self._inbox = Inbox()
        self._is_ready = threading.Event()  # set after warm-up, or when it failed
        self._failure: BaseException | None = None  # what killed the engine thread
        self._step_limit_s = config.step_time_limit_s  # written while it warms up
        # Engine thread only, from here on, but for the bulletins' load.
        self._bulletins = Bulletins(
            core,
            events=events,
            publish=publish,
            report=report,
            heartbeat_interval_s=config.heartbeat_interval_s,
            clock=clock,
        )
        self._outbox = Outbox(config.stream_interval_s, self._bulletins.ended)
        self._step_s = 0.0  # the last step's
        self._hands_over = False  # whatever is here or comes is for another replica
        self._in_hand: Message | None = None  # taken from the inbox, and not yet done with

    # -- any thread -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine thread and wait until the runner is warm. Raises what warm-up raised."""
        self._watchdog.start()
        self._inbox.open()
        self._thread.start()
        self._is_ready.wait()
        if self._failure is not None:
            self._watchdog.close()
            raise self._failure

    def load(self) -> Load:
        """The load as of the last step, or of some 50 ms ago while all sequences only decode."""
        return self._bulletins.load

    def stats(self) -> EngineStats:
        """Counters as of the same moment as `load`."""
        return self._bulletins.stats

    def watch(self, watcher: RequestWatcher) -> None:
        """Tell `watcher`, on the engine thread, of every request's end from now on."""
        self._core.watch(watcher)

    def check_health(self) -> None:
        """Raises EngineStopped when the engine can serve nothing any more."""
        why = self._inbox.why_closed
        if why is not None or not self._thread.is_alive():
            raise EngineStopped(why or "its thread has died") from self._failure

    def drain(self) -> None:
        """Tell routers to send nothing new; who comes all the same is served. Any thread; idempotent."""
        if self._door is not None:
            self._door.draining()  # at once: the engine thread may be inside a step
        self._inbox.post(Drain())

    def hand_over(self) -> None:
        """End what is in flight, and whatever comes, with HandedOver: another replica goes on with it from
        the tokens it has. After the present step; any thread; idempotent."""
        self._inbox.post(HandOver())

    def close(self, timeout_s: float | None = None) -> None:
        """Stop after the present step; requests in flight end with EngineStopped. May be called twice.

        timeout_s: how long to wait for that step; None = the step time limit.
        """
        self._inbox.close("it was closed")
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(self._step_limit_s if timeout_s is None else timeout_s)
        self._watchdog.close()

    # -- event loop threads -----------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Stream one generation: the first token at once, then what each `stream_interval_s` brought.

        Raises RequestRefused in one of its kinds, and LeftUnread for who reads too little of it. Closing or
        cancelling the generator cancels the request: its blocks are free after the step in progress.
        """
        stream = DeltaStream(asyncio.get_running_loop(), request.num_answers_left, on_left=self._abandon)
        arrival_s = self._clock()
        structure = await self._compiled(request)
        self._announce(request)
        if not self._inbox.post(Submit(request, stream, arrival_s, structure)):
            self._withdraw(request.request_id)
            raise EngineStopped(self._inbox.why_closed or "it is closing")
        try:
            while not stream.is_read:
                yield await stream.next()
        finally:
            if not stream.is_over:
                self._inbox.post(Cancel(stream))

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
        if not self._inbox.post(AskPins(question, answer)):
            raise EngineStopped(self._inbox.why_closed or "it is closing")
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
        return await self._core.structures.begin_soon(
            request.structure, min_tokens=minimum, tenant=request.tenant
        )

    def _abandon(self, stream: DeltaStream) -> None:
        self._inbox.post(Abandon(stream))

    def _announce(self, request: GenerateRequest) -> None:
        if self._door is not None:
            self._door.arrived(
                Arrival(
                    request.request_id,
                    len(request.token_ids),
                    hints(request.block_hashes),
                    self._config.block_size,
                    request.tenant,
                    request.share,
                    request.priority,
                    request.waited_s,
                )
            )

    def _withdraw(self, request_id: RequestId) -> None:
        if self._door is not None:
            self._door.refused(request_id)

    # -- engine thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._warm_up()
            while self._is_staying():
                self._core.pins.expire()
                self._bulletins.publish_if_due()  # before the step: routers should know who has arrived
                self._step()
                # Before the answers: whoever is told of a pin finds it everywhere.
                self._bulletins.report_if_due()
                self._drop(self._outbox.deliver())
                self._bulletins.publish_if_due()
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
        if self._core.has_work and self._inbox.is_empty:
            return True
        self._watch_intake(self._config.heartbeat_interval_s)
        return self._take_inbox()

    def _watch_intake(self, idle_s: float = 0.0) -> None:
        """idle_s: that it may wait for something to come."""
        self._watchdog.begin("taking requests in", idle_s + OUTSIDE_STEP_LIMIT_S)

    def _take_inbox(self) -> bool:
        """Take in what was posted, waiting for something only while idle, and no more than the next step may
        wait for; False when told to stop."""
        limit_s = INTAKE_SHARE * self._step_s if self._core.is_decoding else INTAKE_LIMIT_S
        until_s = None
        for message in self._inbox.take(0.0 if self._core.has_work else self._bulletins.until_heartbeat_s()):
            self._watch_intake()  # anew: many are no hang
            if until_s is None:
                until_s = self._clock() + limit_s
            self._in_hand = message
            match message:
                case Submit():
                    self._submit(message)
                case Cancel():
                    self._cancel(message.stream)
                case Abandon():
                    self._core.count_unread()
                    self._cancel(message.stream)
                case AskPins():
                    self._answer_of_pins(message)
                case Drain():
                    self._bulletins.drains()
                case HandOver():
                    self._give_back()
                case Stop():
                    return False
            if self._clock() >= until_s:
                break
        self._in_hand = None
        return True

    def _submit(self, message: Submit) -> None:
        try:
            if self._hands_over or (self._bulletins.is_draining and message.request.pin is not None):
                raise HandedOver
            requests = self._core.take(
                message.request, arrival_s=message.arrival_s, structure=message.structure
            )
        except RequestRefused as error:
            self._withdraw(message.request.request_id)
            self._outbox.send(message.stream, error)
            return
        self._outbox.open(message.request, requests, message.stream)
        self._bulletins.admitted(message.request.request_id)

    def _cancel(self, stream: DeltaStream) -> None:
        if (submit := self._inbox.withdraw(stream)) is not None:
            self._withdraw(submit.request.request_id)
        self._drop(self._outbox.close(stream))

    def _answer_of_pins(self, message: AskPins[Any]) -> None:
        version_before = self._core.pins.version
        answer = message.question(self._core.pins)
        if self._core.pins.version != version_before:
            self._bulletins.changed()
            self._bulletins.report_if_due()  # before the answer: whoever has it finds the change everywhere
        if message.answer.set_running_or_notify_cancel():
            message.answer.set_result(answer)

    def _give_back(self) -> None:
        self._hands_over = True
        self._bulletins.drains()
        # What is computed already, nobody needs to do again.
        for request in self._outbox.close_all(HandedOver, sends_rest=True):
            self._core.hand_over(request.request_id)
            self._bulletins.changed()

    def _step(self) -> None:
        if self._core.has_work:
            self._watchdog.begin("step", self._step_limit_s, self._outbox.request_ids)
            began_s = self._clock()
            has_ended = False
            for entry in self._core.step():
                has_ended |= entry.is_last
                self._drop(self._outbox.record(entry))
            if has_ended:
                self._bulletins.changed()
            now_s = self._clock()
            self._step_s = now_s - began_s
            self._outbox.send_due(now_s, self._step_s)
            self._bulletins.stepped()

    def _drop(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._core.cancel(request.request_id)
            self._bulletins.changed()

    def _end_everything(self) -> None:
        """No request may wait for a thread that is gone."""
        reason = self._inbox.close("its thread has died")
        self._watchdog.end()
        self._outbox.close_all(lambda: EngineStopped(reason), sends_rest=False)
        for message in (self._in_hand, *self._inbox.take(0.0)):
            if isinstance(message, Submit):
                self._outbox.send(message.stream, EngineStopped(reason))
            elif isinstance(message, AskPins) and message.answer.set_running_or_notify_cancel():
                message.answer.set_exception(EngineStopped(reason))
        self._outbox.deliver()
        self._is_ready.set()
