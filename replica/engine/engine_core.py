"""The engine without its thread: submit, cancel, step.

Joins scheduler, cache, runner and detokenizers; one call of `step` computes one step. `Engine`
(`engine.py`) drives it from its own thread; tests, benchmarks and `ask` drive it directly.
Not thread-safe. Knows nothing of asyncio, sockets or Ray.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cache.block_hash import BlockHasher
from cache.disciplines import CacheDiscipline, paged_cache
from cache.engine_report import EngineReport
from cache.errors import RequestRefused, ServingError, StructureRefused
from cache.events import Load
from cache.host_tier import HostTier, TierEventSink
from cache.messages import FinishReason, GenerateRequest
from cache.scheduling_order import SchedulingOrder
from cache.types import RequestId
from replica.config import ReplicaConfig
from replica.engine.completion import Completion
from replica.engine.engine_meter import Ending, EngineMeter
from replica.engine.engine_stats import EngineStats
from replica.engine.host_copies import HostCopies
from replica.engine.intake import Intake
from replica.engine.pins import EnginePins, pin_limit
from replica.engine.pipeline import pipeline
from replica.engine.request_watch import RequestWatcher
from replica.engine.taken_tokens import take_token, take_tokens
from replica.errors import AdmissionFailed, EngineBroken, ForwardFailed, InvalidLogits, StepOutOfMemory
from replica.output.detokenizer import NoText, TokenDecoder
from replica.scheduling.copy_pace import CopyPace
from replica.scheduling.request import Request
from replica.scheduling.runner import Runner, ScheduledSequence, StepResult
from replica.scheduling.scheduler import Scheduler
from replica.scheduling.step_time import StepTimeFit, step_work
from replica.structures.compiler import NoStructures, Structures
from replica.structures.matcher import StructureMatcher

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step did for one request. It is over when it has a finish reason or an error."""

    request: Request
    token_id: int | None = None  # the token it got; None when it ended without one
    error: ServingError | None = None

    @property
    def is_last(self) -> bool:
        return self.error is not None or self.request.finish_reason is not None


class EngineCore:
    """One runner, one cache, one schedule."""

    def __init__(
        self,
        runner: Runner,
        config: ReplicaConfig,
        hasher: BlockHasher,
        *,
        decoder: TokenDecoder | None = None,
        spelling_decoder: TokenDecoder | None = None,
        structures: Structures | None = None,
        sink: TierEventSink | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """decoder: None for an engine whose text nobody reads; then stop strings never match.

        spelling_decoder: for requests whose texts are to spell special tokens; None: `decoder` does.
        structures: None for one whose tokens stand for nothing; then no structure is followed.
        """
        info = runner.info
        self.max_model_len = min(info.max_model_len, config.max_model_len or info.max_model_len)
        self._runner = runner
        self.structures = structures or NoStructures("this engine does not know what its tokens stand for")
        self._clock = clock
        self._step_time = StepTimeFit()
        copy_pace = CopyPace(
            self._step_time.model,
            block_size=info.block_size,
            max_batched_tokens=config.max_batched_tokens,
        )
        host = None
        if info.num_host_blocks:
            host = HostTier(
                info.num_host_blocks,
                sink,
                is_cheaper=copy_pace.is_cheaper,
                on_declined=copy_pace.refused,
            )
        self._cache = paged_cache(
            CacheDiscipline(config.cache_discipline),
            info.num_blocks,
            hasher,
            block_size=info.block_size,
            prefix_caching=config.prefix_caching,
            sink=sink if host is None else None,
            host=host,
            max_pinned=pin_limit(
                info.num_blocks,
                info.block_size,
                max_fraction=config.max_pinned_fraction,
                max_model_len=self.max_model_len,
            ),
        )
        self.pins = EnginePins(self._cache, clock)
        self._scheduler = Scheduler(
            self._cache,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_model_len=self.max_model_len,
            max_batched_tokens=config.max_batched_tokens,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            max_wait_s=math.inf if config.max_wait_s is None else config.max_wait_s,
            clock=clock,
            num_layers=info.num_layers,
            order=SchedulingOrder(config.scheduling_order),
            itl_target_s=config.itl_target_s,
            pace=self._step_time.model,
            swaps=config.preemption == "swap",
            copy_block_s=copy_pace.block_s,
        )
        self._steps = pipeline(config.async_scheduling, self._scheduler, self._cache, runner)
        self._intake = Intake(
            info,
            self._cache,
            self._scheduler,
            self.pins,
            max_model_len=self.max_model_len,
            decoder=decoder or NoText(),
            spelling_decoder=spelling_decoder or decoder or NoText(),
            structures=self.structures,
            clock=clock,
        )
        self._meter = EngineMeter(looks_up_prefixes=config.prefix_caching)
        self._copies = HostCopies(self._cache, runner, self._scheduler, copy_pace, self._meter)
        self._watchers: list[RequestWatcher] = []
        self._ended_at_submission: list[Progress] = []
        self._logged_cause = ""

    def warm_up(self) -> float:
        """Let the runner do once what its first steps would otherwise wait for. Seconds of a full step."""
        return self._runner.warm_up()

    def watch(self, watcher: RequestWatcher) -> None:
        """Tell `watcher` of every request's end from now on. Any thread."""
        self._watchers.append(watcher)

    # -- requests ---------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, *, arrival_s: float | None = None) -> Request:
        """`take` a request for one answer."""
        [taken] = self.take(request, arrival_s=arrival_s)
        return taken

    def take(
        self,
        request: GenerateRequest,
        *,
        arrival_s: float | None = None,
        structure: StructureMatcher | None = None,
    ) -> list[Request]:
        """Take a request in, as one request for each answer it wants; they start with one of the next steps.

        arrival_s: when its deadline began to run, on this engine's clock; None = now.
        structure: the request's, compiled; None = compile it now, while nothing else is done.
        Raises RequestRefused (InvalidRequest, PromptTooLong, TooLargeForCache, QueueFull, PinsFull,
        StructureRefused, AdmissionFailed) and keeps nothing.
        """
        taken, begin_together = self._admit(request, arrival_s, structure)
        lead, *others = taken
        is_held = lead.lease is not None and self.pins.take(lead)
        if begin_together:
            self._scheduler.submit(lead, others)
        else:
            for begun in taken:
                self._scheduler.submit(begun)
        if is_held:
            lead.cached_tokens = lead.num_prompt_tokens
            self._end_at_submission(lead, FinishReason.LENGTH)
        else:
            self._replay_all(taken)
        return taken

    def _admit(
        self, request: GenerateRequest, arrival_s: float | None, structure: StructureMatcher | None
    ) -> tuple[list[Request], bool]:
        """`Intake.admit`. It keeps nothing, so what it fails of is one request's: the others go on."""
        try:
            return self._intake.admit(request, arrival_s, structure)
        except RequestRefused:
            raise
        except Exception as error:
            logger.error(
                "a request could not be taken in; the engine goes on",
                extra={"request_id": request.request_id},
                exc_info=error,
            )
            raise AdmissionFailed(type(error).__name__) from error  # the message may quote tokens

    def cancel(self, request_id: RequestId) -> Request | None:
        """Drop a request and free its blocks at once; None if it is not here (any more)."""
        return self._drop(request_id, Ending.ABORTED)

    def hand_over(self, request_id: RequestId) -> Request | None:
        """The same of one that another replica goes on with."""
        return self._drop(request_id, Ending.HANDED_OVER)

    def count_unread(self) -> None:
        """Tell metrics of a request that its client did not read."""
        self._meter.left_unread()

    @property
    def has_work(self) -> bool:
        return len(self._scheduler) > 0 or bool(self._ended_at_submission)

    @property
    def is_decoding(self) -> bool:
        """Whether somebody waits for the next token of an answer. O(running requests)."""
        return self._scheduler.is_decoding

    @property
    def num_waiting(self) -> int:
        """Requests that no step has begun on, or that one was taken back from."""
        return self._scheduler.num_waiting

    def requests(self) -> Iterable[Request]:
        """Every request not finished."""
        return iter(self._scheduler)

    # -- steps ------------------------------------------------------------------------------------

    def step(self) -> list[Progress]:
        """Compute one step; what it did, one entry per request it moved forward or ended.

        A forward that raises fails the requests of its step with ForwardFailed and leaves the rest alone. One
        that computes NaN for some of them fails these and moves nobody forward. Nor does one that runs out of
        memory, and those after it are smaller.
        """
        progress, self._ended_at_submission = self._ended_at_submission, []
        too_late = [*self._scheduler.expire(), *self._scheduler.give_up()]
        progress += [self._expired(request, error) for request, error in too_late]
        sequences = self._steps.next()
        if not sequences:
            return progress
        if not self._copies.make():
            self._steps.drop()
            return progress
        try:
            result = self._steps.compute()
            self._check(result, sequences)
        except EngineBroken:
            raise
        except StepOutOfMemory as error:
            self._steps.drop()
            if self._scheduler.retreat():
                self._note_retreat(error)
                return progress
            return progress + self._fail(self._scheduler.fail_step(), error, len(sequences))
        except InvalidLogits as error:
            self._steps.drop()
            return progress + self._fail(self._scheduler.fail_some(error.places), error, len(sequences))
        except Exception as error:
            self._steps.drop()
            return progress + self._fail(self._scheduler.fail_step(), error, len(sequences))
        self._measure(sequences, result)
        _keep_logprobs(sequences, result)
        now_s = self._clock()
        return progress + [self._advance(request, now_s) for request in self._scheduler.update(result)]

    def complete(self, requests: Iterable[GenerateRequest]) -> list[Completion]:
        """Run these requests to their end and return their answers in the same order.

        Raises the first error that any of them ends with, the others cancelled.
        """
        taken: list[Request] = []
        try:
            for wanted in requests:
                taken += self.take(wanted)  # a refusal cancels earlier ones
            while any(request.finish_reason is None for request in taken):
                for progress in self.step():
                    if progress.error is not None:
                        raise progress.error
        except BaseException:
            for request in list(self.requests()):
                self.cancel(request.request_id)
            raise
        return [Completion.of(request) for request in taken]

    # -- what others may see ----------------------------------------------------------------------

    def load(self, admitted: tuple[RequestId, ...] = ()) -> Load:
        """The engine's work now, as routers are told. O(requests)."""
        return self._scheduler.load(admitted)

    def stats(self) -> EngineStats:
        return self._meter.stats(
            cache=self._cache.stats(),
            preemptions=self._scheduler.num_preemptions,
            steps_ahead=self._steps.num_begun_ahead,
            wasted_tokens=self._steps.num_wasted,
        )

    def report(self, *, epoch: int, number: int) -> EngineReport:
        """What this engine has done since it started, as metrics tell it. O(requests)."""
        cache = self._cache.stats()
        return self._meter.report(
            epoch=epoch,
            number=number,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            used_blocks=cache.used,
            cached_blocks=cache.cached,
            total_blocks=cache.total,
            pinned_blocks=cache.pinned,
            max_pinned_blocks=self._cache.pins.limit,
            pins=self.pins.held(),
            preemptions=self._scheduler.num_preemptions,
            cut_steps=self._scheduler.num_cut_steps,
            early_steps=self._scheduler.num_early_steps,
            swapped=self._scheduler.num_swapped,
            host=self._cache.host_totals(),
            step_budget=self._scheduler.step_budget,
            structures=self.structures.totals(),
        )

    # -- parts of the above -----------------------------------------------------------------------

    def _replay_all(self, requests: Sequence[Request]) -> None:
        """`_replay` each. Raises StructureRefused for one's tokens, and keeps none of them."""
        try:
            for request in requests:
                self._replay(request)
        except StructureRefused:
            for request in requests:
                self._scheduler.cancel(request.request_id)
            self._ended_at_submission = [
                told for told in self._ended_at_submission if told.request not in requests
            ]
            raise

    def _replay(self, request: Request) -> None:
        """Bring a continued stream's text and structure to where the earlier attempt was.

        The earlier attempt may have died after its last token and before saying so: then it ends here.
        Raises StructureRefused for tokens that leave the structure.
        """
        if (reason := take_tokens(request, request.token_ids[request.num_prompt_tokens :])) is not None:
            request.cached_tokens = 0
            self._end_at_submission(request, reason)

    def _end_at_submission(self, request: Request, reason: FinishReason) -> None:
        """There is nothing to compute: the next step tells of its end."""
        self._end(request, reason)
        self._ended_at_submission.append(Progress(request))

    def _advance(self, request: Request, now_s: float) -> Progress:
        """The request has just got a token: decide whether it is the last."""
        token_id = request.token_ids[-1]
        self._meter.got_token(request, now_s)
        if request.for_cache:
            return self._computed(request)
        try:
            reason = take_token(request, token_id)
        except StructureRefused as error:
            self._scheduler.cancel(request.request_id)
            self._note_end(request, Ending.FAILED)
            return Progress(request, error=error)
        if reason is not None:
            self._end(request, reason)
        return Progress(request, token_id)

    def _computed(self, request: Request) -> Progress:
        """Its prompt has been, for the cache or to be held: that is its end, and its token nobody's."""
        self._meter.token_is_nobodys()
        try:
            if request.lease is not None:
                self.pins.hold(request)
        except RequestRefused as error:
            self._scheduler.finish(request)
            self._note_end(request, Ending.FAILED)
            return Progress(request, error=error)
        self._end(request, FinishReason.LENGTH)
        return Progress(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self._scheduler.finish(request)
        self._note_end(request, Ending.of(reason))

    def _drop(self, request_id: RequestId, ending: Ending) -> Request | None:
        request = self._scheduler.cancel(request_id)
        if request is not None:
            self._note_end(request, ending)
        return request

    def _expired(self, request: Request, error: ServingError) -> Progress:
        self._note_end(request, Ending.ABORTED)
        return Progress(request, error=error)

    def _note_end(self, request: Request, ending: Ending) -> None:
        now_s = self._clock()
        if request.lease is not None:
            self.pins.ended(request)
        self._meter.ended(request, ending, now_s)
        for watcher in self._watchers:
            watcher.ended(request, ending, now_s)

    def _note_retreat(self, error: StepOutOfMemory) -> None:
        self._meter.ran_out_of_memory()
        logger.warning(
            "a step ran out of memory; it is taken back, and steps are half as large for a while",
            extra={"num_tokens": error.num_tokens, "step_budget": self._scheduler.step_budget},
            exc_info=error,
        )

    def _fail(self, failed: Sequence[Request], error: Exception, num_sequences: int) -> list[Progress]:
        self._meter.step_failed()
        cause = f"{type(error).__name__}: {error}"
        logger.error(
            "forward failed; these requests fail, the engine goes on",
            extra={
                "num_sequences": num_sequences,
                "num_failed_steps": self._meter.num_failed_steps,
                "request_ids": [request.request_id for request in failed],
            },
            # A cause that repeats with every step is told in full once.
            exc_info=error if cause != self._logged_cause else None,
        )
        self._logged_cause = cause
        reason = type(error).__name__  # the message may quote tokens, so it stays in the log
        for request in failed:
            self._note_end(request, Ending.FAILED)
        return [Progress(request, error=ForwardFailed(reason)) for request in failed]

    def _check(self, result: StepResult, sequences: list[ScheduledSequence]) -> None:
        """A runner that breaks its promise must not leave the schedule half updated."""
        expected = [sequence.samples for sequence in sequences]
        got = [token_id is not None for token_id in result.next_tokens]
        if got != expected:
            raise RuntimeError(f"the runner sampled {sum(got)} of {sum(expected)} sequences that should")

    def _measure(self, sequences: list[ScheduledSequence], result: StepResult) -> None:
        work = step_work(sequences)
        self._meter.stepped(sequences, work, result.elapsed_s)
        self._step_time.observe(
            new_tokens=work.new_tokens,
            attention=work.attention,
            sequences=work.sequences,
            elapsed_s=result.elapsed_s,
        )
        self._scheduler.took(result.elapsed_s)


def _keep_logprobs(sequences: list[ScheduledSequence], result: StepResult) -> None:
    """What the step found, put where it waits to be sent."""
    for index, found in result.logprobs.items():
        if (log := sequences[index].logprobs) is not None:
            log.add_drawn(found)
    for index, found in result.prompt_logprobs.items():
        if (log := sequences[index].logprobs) is not None:
            log.add_prompt(sequences[index].start, found)
