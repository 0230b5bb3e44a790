"""One generation, over as many attempts as it takes: place, send, and continue elsewhere when that fails.

    place ──> send ──> deltas ... finish_reason
      ^                  │ replica lost / busy / forward failed
      └── exclude it <───┘ the next attempt carries prompt + tokens so far, and how much text was sent

A replica that leaves hands its streams over: that is nobody's failure, and no attempt of those allowed; where
nobody else is there, they wait for its successor as long as a held request does (`placement/held.py`).
Decides once per attempt; what a client already has is never sent again. Knows routing and tokens; knows
neither HTTP nor Ray (`ReplicaCalls` is the border to a replica).
Owner: the router's event loop.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from array import array
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cache.block_hash import PackedHashes
from cache.errors import DeadlineExceeded, PiecesLost, QueueFull, RequestRefused
from cache.messages import AnswerSoFar, Delta, GenerateRequest
from cache.tracing import Attributes
from cache.types import ReplicaId
from router.dispatch.bill import Bill
from router.dispatch.deadline import until_deadline
from router.dispatch.failed_attempts import FailedAttempts
from router.dispatch.job import Job
from router.dispatch.token_accounts import TokenAccount
from router.errors import NoReplica, ReplicaLost, RoutingError, TooManyDeaths
from router.placement.decision import Placement, RouteQuery

if TYPE_CHECKING:
    from router.dispatch.dispatcher import Dispatcher

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Answer:
    """One of the answers, over all attempts."""

    token_ids: array[int] = field(default_factory=lambda: array("i"))  # everything generated so far
    sent_chars: int = 0
    is_over: bool = False

    def take(self, delta: Delta) -> None:
        self.token_ids.extend(delta.token_ids)
        self.sent_chars += len(delta.text)
        self.is_over = delta.finish_reason is not None


class Generation:
    """One job's deltas across attempts. Iterate `deltas()` once; close it to cancel."""

    def __init__(self, dispatcher: Dispatcher, job: Job) -> None:
        self._shared = dispatcher
        self._job = job
        self._answers = [_Answer() for _ in range(job.n)]
        self._bill = Bill(job, dispatcher.placer)
        self._account = TokenAccount(self._bill.charge, most=job.n * job.sampling.max_tokens)
        # Of the full blocks of `_tokens()`, as of the last attempt.
        self._block_hashes = PackedHashes.of(job.block_hashes)
        self._excluded = job.excluded
        config = dispatcher.config
        self._failed = FailedAttempts(config.max_attempts, config.max_deaths)
        self._continues_from = 0  # tokens sent to another replica to go on from, until it has
        self._is_handed_over = False  # by the last attempt
        self._engine_s = 0.0  # of the replica's time, for the last attempt's prefill
        self._query: RouteQuery | None = None  # of the last attempt; None: there was none, or it is closed
        self._was_placed = False
        self.num_attempts = 0  # begun so far
        self.was_accepted = False  # by a replica, in any attempt that is over
        # Of the attempt that computed the first token; None until then.
        self.replica_id: ReplicaId | None = None
        self.overlap_blocks = 0
        self.cached_tokens: int | None = None
        self._is_without_token = False  # as the gauge has it

    @property
    def has_tokens(self) -> bool:
        return self._num_output_tokens > 0

    @property
    def _num_output_tokens(self) -> int:
        return sum([len(answer.token_ids) for answer in self._answers])

    @property
    def _is_to_be_scored(self) -> bool:
        """Whether the next attempt finds log probabilities of the prompt: they come with the first answer's
        first token."""
        return self._job.sampling.prompt_logprobs is not None and not self._answers[0].token_ids

    def _tokens(self) -> array[int]:
        """What the next attempt begins with: the prompt, and the answer so far if there is but one."""
        prompt = self._job.prompt
        return prompt + self._answers[0].token_ids if len(self._answers) == 1 else prompt[:]

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Every delta once, each answer's last one with finish_reason; ends after the last of those.

        Raises RoutingError (nobody can take it, or too many died under it) or RequestRefused; also where a
        replica says nothing, soon after the deadline.
        """
        metrics = self._shared.metrics
        self._begin()
        with metrics.in_flight.track_inprogress(), contextlib.closing(self):
            for attempt in itertools.count():
                self.num_attempts = attempt + 1
                try:
                    async with contextlib.aclosing(self._attempt(attempt)) as deltas:
                        async for delta in deltas:
                            yield delta
                    return
                except (ReplicaLost, RequestRefused) as error:
                    self._raise_unless_worth_it(error)

    def _begin(self) -> None:
        timeout_s = self._job.timeout_s or self._shared.config.request_timeout_s
        self._began_at = self._shared.clock()
        self._came_at = self._began_at if self._job.came_at is None else self._job.came_at
        self._deadline = None if timeout_s is None else self._came_at + timeout_s
        self._is_without_token = True
        self._shared.metrics.without_token.inc()

    def _wait_no_longer(self) -> None:
        """For its first token. Idempotent."""
        if self._is_without_token:
            self._is_without_token = False
            self._shared.metrics.without_token.dec()

    def close(self) -> None:
        """The request is over: whoever follows decisions hears it, with the blocks of what was computed."""
        self._wait_no_longer()
        query, self._query = self._query, None
        if query is None:
            return
        if not self._was_placed:
            self._shared.routing.refused(query)
            return
        self._hash_new_blocks()
        self._bill.is_over = True
        self._bill.serve(self._account.num_charged)
        self._shared.accounts.close(self._job.request_id, is_whole=all(a.is_over for a in self._answers))
        self._shared.routing.finish(
            self._job.request_id,
            block_hashes=self._block_hashes,
            answers=[len(answer.token_ids) for answer in self._answers],
        )

    async def _attempt(self, attempt: int) -> AsyncGenerator[Delta, None]:
        """One attempt. The reservation is released however it ends, and the replica told if it ends early."""
        routing, request_id = self._shared.routing, self._job.request_id
        try:
            placement = await self._decide(attempt)
            async with contextlib.aclosing(self._stream(placement, attempt)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self.was_accepted |= routing.accepted_by(request_id) is not None
            self._was_placed |= routing.release(request_id)

    async def _stream(self, placement: Placement, attempt: int) -> AsyncGenerator[Delta, None]:
        """What the replica that takes it generates. Whoever lets it down is excluded from then on."""
        shared, request = self._shared, self._request(placement, attempt)
        self._account.begin(attempt)
        shared.accounts.open(request.request_id, self._account)
        try:
            sent = until_deadline(shared.calls.generate(request), request.deadline_s)
            async with contextlib.aclosing(sent) as deltas:
                async for delta in deltas:
                    self._take(delta, placement)
                    yield delta
                    if delta.finish_reason is not None and all(a.is_over for a in self._answers):
                        return
            raise ReplicaLost("its stream ended without a finish_reason")
        except (RoutingError, RequestRefused) as error:
            if not error.may_have_begun:
                self._account.refused()
            if not isinstance(error, PiecesLost):  # what failed is between us, and this replica has it cached
                self._excluded |= {self._taken_by(placement)}
            raise

    async def _decide(self, attempt: int) -> Placement:
        """`_place`, and what is said of it."""
        shared, job = self._shared, self._job
        named: dict[str, str | int | float | bool] = {"request_id": job.request_id, "attempt": attempt}
        span, began_at, why = (
            shared.tracing.begin("decide", job.traceparent, attributes=named),
            shared.clock(),
            None,
        )
        try:
            placement = await self._place(attempt)
        except BaseException as error:
            why = type(error).__name__
            raise
        else:
            found: Attributes = {
                "replica_id": placement.replica_id,
                "policy": placement.policy,
                "reason": placement.reason.value,
                "overlap_blocks": placement.overlap_blocks,
                "matched_tokens": placement.overlap_blocks * shared.config.fingerprint.block_size,
            }
            span.tell(found)
            if shared.config.log_requests:
                waited_s = round(shared.clock() - began_at, 4)
                logger.info("request placed", extra={**named, **found, "waited_s": waited_s})
            return placement
        finally:
            span.end(why)

    async def _place(self, attempt: int) -> Placement:
        """Match, cost, pick, reserve; waiting for a replica, if that is how they are bound.

        Raises RoutingError or DeadlineExceeded.
        """
        shared, job, tokens = self._shared, self._job, self._tokens()
        self._hash_new_blocks()
        started_at = shared.clock()
        self._query = RouteQuery(
            request_id=job.request_id,
            # A prompt that is to be scored takes no hits: every replica computes all of it.
            block_hashes=() if self._is_to_be_scored else self._block_hashes,
            num_prompt_tokens=len(tokens),
            excluded=self._excluded,
            policy=job.policy,
            max_tokens=job.sampling.max_tokens - (len(tokens) - len(job.prompt)),
            n=job.n,
            token_ids=tokens,
            cache_salt=job.cache_salt,
            tenant=job.tenant,
            share=job.share,
            priority=job.priority,
            part=job.part,
            admittance=job.admittance,
            prompt=job.text,
            session=job.session,
            asked_at=self._began_at,
            is_handed_over=self._is_handed_over,
            is_again=job.is_again or attempt > 0,
            attempt=attempt,
        )
        placement = await shared.placer.place(self._query, since=self._began_at, deadline=self._deadline)
        self._engine_s = placement.engine_s
        if shared.config.binding == "late":
            shared.metrics.held_s.observe(shared.clock() - started_at)
        shared.metrics.decisions.labels(placement.policy, placement.reason.value).inc()
        return placement

    def _hash_new_blocks(self) -> None:
        """Extends the chain by what earlier attempts generated: a few blocks, so not worth a thread."""
        shared, tokens = self._shared, self._tokens()
        first, last = len(self._block_hashes), len(tokens) // shared.config.fingerprint.block_size
        if first < last:
            root = shared.hasher.root(salt=self._job.cache_salt)
            parent = self._block_hashes[-1] if self._block_hashes else root
            self._block_hashes += shared.hasher.extend(parent, tokens, first, last)

    def _request(self, placement: Placement, attempt: int) -> GenerateRequest:
        """Raises DeadlineExceeded for what nobody wants any more."""
        job, now, deadline = self._job, self._shared.clock(), self._deadline
        if deadline is not None and deadline <= now:
            raise DeadlineExceeded(deadline - self._began_at, now - self._began_at)
        held_s, refused_ratio = self._shared.work_told()
        return GenerateRequest(
            request_id=job.request_id,
            token_ids=self._tokens(),  # a copy: ours grow while the call may still be being sent
            num_prompt_tokens=len(job.prompt),
            sampling=job.sampling,
            seed=job.seed,
            sent_chars=self._answers[0].sent_chars if job.n == 1 else 0,
            cache_salt=job.cache_salt,
            tenant=job.tenant,
            share=job.share,
            priority=job.priority,
            waited_s=now - self._began_at,
            attempt=attempt,
            excluded_replicas=self._excluded,
            ranks=placement.ranks,
            block_hashes=placement.block_hashes,
            deadline_s=None if deadline is None else deadline - now,
            traceparent=job.traceparent,
            pin=job.pin,
            n=job.n,
            answers=self._answers_so_far(),
            structure=job.structure,
            held_s=held_s,
            refused_ratio=refused_ratio,
        )

    def _answers_so_far(self) -> tuple[AnswerSoFar, ...]:
        """For a replica that goes on with several; () if there is but one, or none has begun."""
        if len(self._answers) == 1 or not self.has_tokens:
            return ()
        return tuple(AnswerSoFar(a.token_ids[:], a.sent_chars, a.is_over) for a in self._answers)

    def _take(self, delta: Delta, placement: Placement) -> None:
        if self.cached_tokens is None:
            self._take_first(delta, placement)
        if self._continues_from:
            self._count_continuation(delta, self._taken_by(placement))
        self._answers[delta.choice].take(delta)
        self._account.read(len(delta.token_ids))
        self._shared.metrics.completion_tokens.inc(len(delta.token_ids))

    def _taken_by(self, placement: Placement) -> ReplicaId:
        return self._shared.routing.accepted_by(self._job.request_id) or placement.replica_id

    def _take_first(self, delta: Delta, placement: Placement) -> None:
        """Who computed the first token, and how much of the prompt its cache held."""
        self._wait_no_longer()
        self.replica_id = self._taken_by(placement)
        self.overlap_blocks = placement.overlap_blocks
        self.cached_tokens = delta.cached_tokens
        self._shared.routing.first_token(self._job.request_id, self.replica_id, delta.cached_tokens)

    def _count_continuation(self, delta: Delta, replica_id: ReplicaId) -> None:
        """Another replica has gone on with the stream: what it had to compute again for that.

        It counts what it found cached of the prompt; what was generated before it has surely not.
        """
        metrics, sent = self._shared.metrics, self._continues_from
        self._shared.routing.continued(self._job.request_id)
        cached = min(max(delta.cached_tokens, 0), sent)
        if cached != delta.cached_tokens:  # its own count is wrong: no reason to end the stream
            fields = {"cached_tokens": delta.cached_tokens, "sent_tokens": sent, "replica_id": replica_id}
            logger.warning("wrong cached tokens", extra={"request_id": self._job.request_id, **fields})
        metrics.continuations.inc()
        metrics.continued_tokens.labels("cached").inc(cached)
        metrics.continued_tokens.labels("computed").inc(sent - cached)
        self._continues_from = 0

    def _raise_unless_worth_it(self, error: ReplicaLost | RequestRefused) -> None:
        """Returns if another attempt elsewhere is worth it; raises what the client is told otherwise."""
        if isinstance(error, ReplicaLost):
            self._shared.routing.request_lost()
        is_full = isinstance(error, QueueFull)
        if is_full:
            self._shared.placer.not_taken(self._engine_s)
        why = self._failed.add(error, self._num_output_tokens)
        # Not a copy of a pin: that is for this replica, and whoever wants it chooses another.
        self._is_handed_over = why == "handed_over" and self._job.pin is None
        if why is None or not (self._is_handed_over or self._has_alternative()):
            if is_full:
                self._shared.placer.given_up(self._engine_s)
            raise self._final(error) from error
        phase = "mid_stream" if self.has_tokens else "before_first_token"
        # Answers that are over have nothing that anybody needs again.
        going_on = sum([len(answer.token_ids) for answer in self._answers if not answer.is_over])
        self._continues_from = len(self._job.prompt) + going_on if self.has_tokens else 0
        self._shared.metrics.retries.labels(why, phase).inc()
        logger.warning(
            "retrying elsewhere",
            extra={"request_id": self._job.request_id, "why": why, "phase": phase},
        )

    def _has_alternative(self) -> bool:
        return any(replica_id not in self._excluded for replica_id in self._shared.routing.replicas)

    def _final(self, error: ReplicaLost | RequestRefused) -> RoutingError | RequestRefused:
        if isinstance(error, DeadlineExceeded):
            return self._since_arrival(error)
        if not isinstance(error, ReplicaLost):
            return error
        if self._failed.is_suspect:
            return TooManyDeaths(self._job.request_id, self._failed.num_deaths)
        return NoReplica(len(self._shared.routing.replicas), len(self._excluded))

    def _since_arrival(self, error: DeadlineExceeded) -> DeadlineExceeded:
        """With its client's numbers: whoever raised it counts from when it heard of the request, and was told
        what was left."""
        if self._deadline is None:
            return error
        deadline_s = self._deadline - self._came_at
        missed_s = deadline_s - error.deadline_s
        return DeadlineExceeded(deadline_s, error.waited_s + missed_s, error.prefill_s)
