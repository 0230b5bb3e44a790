"""Which tokens of which requests are computed in the next step.

No prefill or decode phases: each running request has some tokens to compute, one if it decodes,
many if it prefills, and a step is {request: tokens this step} within one budget.
Knows token counts and blocks; knows neither tensors nor text nor sampling. Engine thread only.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from cache.errors import NoFreeBlocks
from cache.events import Load, StepTimeModel
from cache.kv_cache_manager import KVCacheManager
from cache.types import RequestId
from replica.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    TooLargeForCache,
    WaitTooLong,
)
from replica.scheduling.admission import Admission
from replica.scheduling.load_account import context_tokens, queued_attention, queued_uncached_tokens
from replica.scheduling.promises import Promises
from replica.scheduling.queue_time import queue_s
from replica.scheduling.request import Request, RequestState
from replica.scheduling.runner import ScheduledSequence, StepResult


class Scheduler:
    """Oldest first, always: `running` and `waiting` are both in order of arrival, and everything that
    runs is older than everything that waits.

    That order is what guarantees progress. The oldest request is scheduled first and is never preempted
    for another, and one that fits the pool alone (checked when it is submitted) therefore
    finishes; then the next is the oldest.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_batched_tokens: int,
        max_running: int,
        max_waiting: int,
        clock: Callable[[], float],
        max_wait_s: float = math.inf,
    ) -> None:
        """max_waiting, max_wait_s: beyond either of them nobody is put behind those that wait."""
        self._cache = cache
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._max_batched_tokens = max_batched_tokens
        # No more sequences than tokens in a step, so that each of them moves forward in every step.
        self._max_running = min(max_running, max_batched_tokens)
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._step: list[tuple[Request, int]] = []  # the step being computed: request, its tokens
        self._by_id: dict[RequestId, Request] = {}
        self._following: dict[RequestId, Request] = {}  # who follows whom
        self._admission = Admission(cache, num_blocks=num_blocks, block_size=block_size)
        self._promises = Promises(cache, block_size=block_size)
        self._has_preempted = False  # in the step being computed
        self.num_preemptions = 0  # since the start

    # -- taking requests in and out ---------------------------------------------------------------

    def check_room(
        self,
        request_id: RequestId,
        num_prompt_tokens: int,
        max_output_tokens: int,
        *,
        step_time: StepTimeModel | None = None,
        is_retry: bool = False,
    ) -> None:
        """Raise why a request of this size cannot be taken in; changes nothing. O(requests).

        max_output_tokens: already cut to the model's length limit, at least 1 if the prompt fits.
        is_retry: it has waited elsewhere, and may have begun to answer: it may wait here, however long.
        """
        if request_id in self._by_id:
            raise InvalidRequest("request_id", f"{request_id!r} is being served here already")
        if num_prompt_tokens >= self._max_model_len:
            raise PromptTooLong(num_prompt_tokens, self._max_model_len - 1)
        # The last token is never computed, so it needs no slot.
        if num_prompt_tokens + max_output_tokens - 1 > self._num_blocks * self._block_size:
            raise TooLargeForCache(num_prompt_tokens, max_output_tokens, self._num_blocks, self._block_size)
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull(len(self._waiting), self._max_waiting)
        if self._waiting and not is_retry and self._max_wait_s < math.inf:
            wait_s = queue_s(self.load(step_time), self._max_batched_tokens, self._max_wait_s)
            if wait_s > self._max_wait_s:
                raise WaitTooLong(len(self._waiting), self._max_waiting, wait_s, self._max_wait_s)

    def submit(self, request: Request, followers: Sequence[Request] = ()) -> None:
        """Put a request that passed `check_room` behind those that wait.

        followers: other answers to the same prompt, none of which has begun. They start when it has been
        computed, on the same blocks; where those are too few for one of them, it waits as any other.
        """
        request.expected_hit = self._promises.expect(request)
        self._by_id[request.request_id] = request
        self._waiting.append(request)
        self._let_follow(request, followers)
        self._by_id.update({follower.request_id: follower for follower in followers})

    def cancel(self, request_id: RequestId) -> Request | None:
        """Drop a request wherever it is and free its blocks. None if it is not (or no longer) here."""
        assert not self._step, "cancel between steps, not inside one"
        request = self._by_id.get(request_id)
        if request is not None:
            self._remove(request)
        return request

    def finish(self, request: Request) -> None:
        """Take a request out that has ended by itself."""
        if request.lease is None:
            self._admission.observe(request.num_output_tokens)
        self._remove(request)

    def _remove(self, request: Request) -> None:
        """Take a request out for good, wherever it is: finished, failed, expired or cancelled."""
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
        elif request.state is RequestState.WAITING:
            self._waiting.remove(request)
        else:
            self._following.pop(request.request_id).followers.remove(request)
        if request.followers:
            self._hand_on(request)
        self._promises.forget(request)
        self._cache.release(request.blocks)
        request.state = RequestState.FINISHED
        del self._by_id[request.request_id]

    def _let_follow(self, leader: Request, followers: Sequence[Request]) -> None:
        leader.followers = list(followers)
        for follower in followers:
            follower.state = RequestState.FOLLOWING
            self._following[follower.request_id] = leader

    def _hand_on(self, leader: Request) -> None:
        """It leaves before its prompt is computed: the next answer leads, before all who came later.

        Whoever runs is older than all that wait, and so are those that follow it.
        """
        heir, *others = leader.followers
        leader.followers = []
        del self._following[heir.request_id]
        heir.state = RequestState.WAITING
        heir.expected_hit = leader.expected_hit
        self._waiting.insert(sum(waiting.arrival_s < heir.arrival_s for waiting in self._waiting), heir)
        self._let_follow(heir, others)

    def expire(self) -> list[tuple[Request, DeadlineExceeded]]:
        """Take out every request whose time has run out, waiting or running."""
        now_s = self._clock()
        late = [r for r in self if r.expires_s is not None and now_s >= r.expires_s]
        for request in late:
            self._remove(request)
        return [(r, _deadline_exceeded(r, now_s)) for r in late]

    # -- one step ---------------------------------------------------------------------------------

    def schedule(self) -> list[ScheduledSequence]:
        """Choose the next step and take its blocks. Empty exactly when there is nothing to do.

        Follow it with `update` or `fail_step`.
        """
        step = self.plan()
        assert step or not self._by_id, "requests are left, but none can be scheduled"
        return [_scheduled(request, num_tokens) for request, num_tokens in step]

    def plan(self) -> Sequence[tuple[Request, int]]:
        """`schedule` for a caller without tensors: the step as requests and their tokens, read-only.

        Empty also when nobody fits because the cache is shared with another scheduler.
        """
        assert not self._step, "the last step was neither updated nor failed"
        self._has_preempted = self._schedule_running()
        # Blocks were short a moment ago: whoever came in now would be the next to be thrown out.
        if not self._has_preempted:
            self._admit_waiting()
        return self._step

    def quiet_steps(self) -> int:
        """How many steps would follow the planned one that only decode and leave the cache alone.

        In each of them every sequence of the plan computes one token, takes no block, fills none, and
        nobody is admitted; as long as nobody ends, comes or is cancelled. O(running).
        """
        if self._has_preempted:  # the next step admits again
            return 0
        # Whoever waits was refused for want of places or blocks, and these steps free neither.
        size, quiet = self._block_size, self._block_size
        for request, num_tokens in self._step:
            end = request.num_computed + num_tokens  # of the planned step
            if end != len(request.token_ids) or num_tokens > 1 or request.followers:
                return 0
            quiet = min(quiet, size - 1 - end % size if end % size else 0)
        return quiet if self._step else 0

    def advance(self, tokens: Sequence[array[int]]) -> None:
        """The planned step and some of the quiet ones after it were computed: each request's tokens.

        All of one length, at most `quiet_steps()`. As if each had been planned and updated; what is open
        now, for `update`, is the step that follows them.
        """
        for (request, _), more in zip(self._step, tokens, strict=True):
            request.token_ids.extend(more)
            request.num_computed += len(more)

    def update(self, result: StepResult) -> list[Request]:
        """The step was computed: record it; the requests that got a token, which is now their last.

        The caller decides whether that token ends the request and then calls `finish`.
        """
        step, self._step = self._step, []
        self._cache.commit_step()
        sampled = []
        for (request, num_tokens), token_id in zip(step, result.next_tokens, strict=True):
            request.num_computed += num_tokens
            if token_id is not None:
                if request.followers:
                    self._fork(request)
                request.token_ids.append(token_id)
                sampled.append(request)
        return sampled

    def fail_step(self) -> list[Request]:
        """The step raised: what it registered is un-registered, its requests are taken out and returned.

        Every request that shares a block of this step is part of the step itself, since blocks are
        shared at admission only and admission schedules: so nobody else is touched.
        """
        step, self._step = self._step, []
        self._cache.abort_step()
        for request, _ in step:
            self._remove(request)
        return [request for request, _ in step]

    def _schedule_running(self) -> bool:
        """Give every running request its tokens, oldest first; whether one had to be preempted.

        Only the newest can be in the middle of its prompt, since nobody is admitted while a prompt takes
        all that is left of the budget: so going by age serves every decode before any chunk.
        """
        before = len(self._running)
        budget = self._max_batched_tokens
        position = 0
        while position < len(self._running):
            request = self._running[position]
            num_tokens = min(request.num_uncomputed, budget)
            assert num_tokens > 0, "no more sequences run than there are tokens in a step"
            if not self._make_room(request, num_tokens):
                return True
            self._step.append((request, num_tokens))
            budget -= num_tokens
            position += 1
        return len(self._running) < before

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Give a request its blocks, at the cost of the newest; False when it was itself the newest."""
        while not self._try_grow(request, num_tokens):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _admit_waiting(self) -> None:
        """Start waiting requests while budget, places and blocks last; the first misfit ends it."""
        budget = self._max_batched_tokens - sum(num_tokens for _, num_tokens in self._step)
        while self._waiting and budget > 0:
            request = self._waiting[0]
            if not self._admission.has_place(request, self._running, self._max_running):
                return
            hit = self._admission.hit(request, self._running)
            if hit is None:
                return
            num_tokens = min(len(request.token_ids) - hit.num_tokens, budget)
            self._cache.admit(request.blocks, hit, num_tokens)
            self._start(self._waiting.popleft(), hit.num_tokens)
            self._step.append((request, num_tokens))
            budget -= num_tokens

    def _fork(self, leader: Request) -> None:
        """Its prompt is computed: those that follow start on it, each with the last prompt token to compute
        again, for a first token of its own. Who finds no place or no block waits, before all others.
        """
        followers, leader.followers = leader.followers, []
        place, late = self._running.index(leader) + 1, []
        for follower in followers:
            del self._following[follower.request_id]
            follower.cached_tokens, follower.admitted_s = leader.cached_tokens, leader.admitted_s
            if self._try_fork(leader, follower):
                follower.state = RequestState.RUNNING
                self._running.insert(place, follower)
                place += 1
            else:
                follower.state = RequestState.WAITING
                late.append(follower)
        self._waiting.extendleft(reversed(late))

    def _try_fork(self, leader: Request, follower: Request) -> bool:
        num_tokens = leader.num_prompt_tokens - 1
        if not num_tokens or len(self._running) >= self._max_running:
            return False
        try:
            self._cache.fork(leader.blocks, follower.blocks, num_tokens)
        except NoFreeBlocks:
            return False
        follower.num_computed = num_tokens
        return True

    def _start(self, request: Request, hit_tokens: int) -> None:
        request.state = RequestState.RUNNING
        request.num_computed = hit_tokens
        if request.cached_tokens is None:
            request.cached_tokens = min(hit_tokens, request.num_prompt_tokens)
            request.admitted_s = self._clock()
        self._running.append(request)

    def _try_grow(self, request: Request, num_tokens: int) -> bool:
        try:
            self._cache.grow(request.blocks, request.num_computed + num_tokens)
        except NoFreeBlocks:
            return False
        return True

    def _preempt(self, victim: Request) -> None:
        """Put the newest running request back to the head of those that wait, with nothing computed.

        It has no part in this step yet: requests are scheduled oldest first, so everyone scheduled
        so far is older. (A scheduled one has registered blocks that would then never be computed.)
        """
        assert victim is self._running[-1]
        assert all(victim is not scheduled for scheduled, _ in self._step[-1:])
        self._running.pop()
        self._cache.release(victim.blocks)
        victim.state = RequestState.WAITING
        victim.num_computed = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(victim)

    # -- what others may see ----------------------------------------------------------------------

    def __iter__(self) -> Iterator[Request]:
        """Every request not finished, in no promised order."""
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def load(self, step_time: StepTimeModel | None, admitted: tuple[RequestId, ...] = ()) -> Load:
        """The work here, as routers are told. admitted: taken in since they were last told. O(requests)."""
        return Load(
            queued_uncached_tokens=queued_uncached_tokens(self._running, self._waiting),
            queued_attention=queued_attention(self._running, self._waiting),
            num_waiting=self.num_waiting,
            num_running=len(self._running),
            context_tokens=context_tokens(self._running),
            free_blocks=self._cache.num_free,
            growth_blocks=self._growth_blocks(),
            total_blocks=self._num_blocks,
            step_time=step_time,
            admitted=admitted,
        )

    def _growth_blocks(self) -> int:
        """What routers are told; nobody needs to know while half of the blocks are free and nobody waits."""
        if not self._waiting and self._cache.num_free * 2 > self._num_blocks:
            return 0
        return self._admission.growth_blocks(self._running)

    @property
    def num_waiting(self) -> int:
        """Those that follow included."""
        return len(self._waiting) + len(self._following)

    @property
    def num_running(self) -> int:
        return len(self._running)


def _scheduled(request: Request, num_tokens: int) -> ScheduledSequence:
    return ScheduledSequence(
        request_id=request.request_id,
        token_ids=request.token_ids,
        block_table=request.blocks.block_table,
        start=request.num_computed,
        num_new_tokens=num_tokens,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        seed=request.seed,
        copy_source=request.blocks.copy_source,
        logprobs=request.logprobs,
        structure=request.structure,
    )


def _deadline_exceeded(request: Request, now_s: float) -> DeadlineExceeded:
    assert request.expires_s is not None
    return DeadlineExceeded(request.expires_s - request.arrival_s, now_s - request.arrival_s)
