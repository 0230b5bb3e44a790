"""Who is here, who waits and who runs; and which tokens of which requests are computed in the next step.

No prefill or decode phases: each running request has some tokens to compute, one if it decodes,
many if it prefills, and a step is {request: tokens this step} within one budget (`step_plan.py` composes it).
Knows token counts and blocks; knows neither tensors nor text nor sampling. Engine thread only.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from cache.events import Load, StepTimeModel
from cache.prefix_cache import PrefixCache
from cache.scheduling_order import SchedulingOrder
from cache.types import RequestId
from replica.errors import DeadlineExceeded, NeverBegan, RequestRefused
from replica.scheduling.admission import Admission
from replica.scheduling.deadlines import deadline_exceeded, too_late
from replica.scheduling.entrance import Entrance
from replica.scheduling.followers import Followers
from replica.scheduling.going_on import NextPart
from replica.scheduling.load_account import (
    context_tokens,
    queued_attention,
    queued_by_tenant,
    queued_uncached_tokens,
)
from replica.scheduling.promises import Promises
from replica.scheduling.request import Request, RequestState
from replica.scheduling.runner import ScheduledSequence, StepResult
from replica.scheduling.running import Running
from replica.scheduling.step_budget import StepBudget
from replica.scheduling.step_plan import StepPlan
from replica.scheduling.told_queue import queued_here
from replica.scheduling.turns import Turns


class Scheduler:
    """Those who run are in order of admission; the order of those who wait only those change who came before.

    That is what guarantees progress. The first of those that run is never preempted for another, and one
    that fits the pool alone (checked when it is submitted) therefore finishes; then the next is the first.
    Whoever is next of those that wait and does not fit keeps all others from starting, so nobody slips by.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_batched_tokens: int,
        max_running: int,
        max_waiting: int,
        clock: Callable[[], float],
        max_wait_s: float = math.inf,
        num_layers: int = 1,
        order: SchedulingOrder = SchedulingOrder.FIRST_COME,
        itl_target_s: float | None = math.inf,
        pace: Callable[[], StepTimeModel | None] = lambda: None,
        swaps: bool = False,
        copy_block_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """max_waiting, max_wait_s: beyond either of them nobody is put behind those that wait.

        num_layers: `RunnerInfo.num_layers`.
        itl_target_s: as `step_room.limit_s` has it. pace: what steps take, as far as that is known.
        swaps: whoever is preempted keeps what it has computed, in the cache's host memory. copy_block_s: what
        a block takes to come back from there.
        """
        self._cache = cache
        self._num_blocks = num_blocks
        self._max_batched_tokens = max_batched_tokens
        self._entrance = Entrance(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_batched_tokens=max_batched_tokens,
            max_waiting=max_waiting,
            max_wait_s=max_wait_s,
        )
        self._clock = clock
        self._order = order
        self._pace = pace
        self._copy_block_s = copy_block_s
        self._turns = Turns(order, max_batched_tokens)
        self._waiting = self._turns.waiting
        self._running = Running(cache, self._waiting, swaps=swaps)
        self._following = Followers()
        self._by_id: dict[RequestId, Request] = {}
        self._admission = Admission(cache, num_blocks=num_blocks, block_size=block_size)
        self._promises = Promises(cache, block_size=block_size)
        self._budget = StepBudget(max_batched_tokens, max_running)
        self._step = StepPlan(  # the one being computed
            cache,
            self._running,
            self._turns,
            self._admission,
            self._budget,
            block_size=block_size,
            num_layers=num_layers,
            itl_target_s=itl_target_s,
            # Under a limit that follows decodes, a long prompt has to use the steps in which nobody decodes.
            ends_early=order.preempts and itl_target_s is not None,
            pace=pace,
            clock=clock,
        )
        self._numbers = itertools.count()
        self.num_cut_steps = 0  # since the start: that were cut short for the decodes' sake
        self.num_early_steps = 0  # likewise: that ended early for the sake of prompts that end with them

    # -- taking requests in and out ---------------------------------------------------------------

    def check_new(self, request_id: RequestId) -> None:
        """Raise RequestRefused if one of that name is here: another replica could take it. O(1)."""
        if request_id in self._by_id:
            raise RequestRefused(f"request_id: {request_id!r} is being served here already")

    def check_room(
        self,
        num_prompt_tokens: int,
        max_output_tokens: int,
        *,
        tenant: str = "",
        share: float = 1.0,
        priority: int = 0,
        deadline_s: float | None = None,
        is_retry: bool = False,
    ) -> None:
        """Raise why no request of this size can be taken in; changes nothing. O(requests).

        max_output_tokens: already cut to the model's length limit, at least 1 if the prompt fits.
        deadline_s: seconds from now after which nobody wants it; None = never.
        is_retry: it has waited elsewhere, and may have begun to answer: it may wait here, however long.
        """
        self._entrance.check_size(num_prompt_tokens, max_output_tokens)
        self._entrance.check_places(self._waiting, tenant)
        if self._waiting and not is_retry:
            queued = queued_by_tenant(self._running.requests, self._waiting, tenant=tenant, priority=priority)
            self._entrance.check_wait(
                self.load(), queued, self._waiting, tenant=tenant, share=share, deadline_s=deadline_s
            )

    def submit(self, request: Request, followers: Sequence[Request] = ()) -> None:
        """Put a request that passed `check_room` among those that wait.

        followers: other answers to the same prompt, none of which has begun. They start when it has been
        computed, on the same blocks; where those are too few for one of them, it waits as any other.
        """
        expected = self._promises.expect(request)
        request.expected_hit = expected.num_tokens
        order, pace = self._order, self._pace()
        uncached, prefill_s = len(request.token_ids) - request.expected_hit, 0.0
        if pace is not None:
            prefill_s = pace.prefill_s(uncached, request.expected_hit, self._max_batched_tokens)
        came_s = request.arrival_s - request.waited_s
        place = order.place(prefill_s, came_s=came_s, now_s=self._clock())
        # What it is to find has to be computed first: before that it is not as short as it seems. Of whoever
        # is less urgent it need not wait for that.
        if (promiser := expected.promiser) is not None:
            place = max(place, promiser.place[0] - order.lag(promiser.priority))
        starts_by_s = math.inf
        if request.expires_s is not None and pace is not None:
            starts_by_s = request.expires_s - prefill_s
        for each in (request, *followers):
            each.place = (place + order.lag(request.priority), next(self._numbers))
            each.starts_by_s = starts_by_s
        self._by_id[request.request_id] = request
        self._waiting.add(request)
        self._step.is_settled = False
        self._following.follow(request, followers)
        self._by_id.update({follower.request_id: follower for follower in followers})

    def cancel(self, request_id: RequestId) -> Request | None:
        """Drop a request wherever it is and free its blocks. None if it is not (or no longer) here."""
        assert not self._step.entries, "cancel between steps, not inside one"
        request = self._by_id.get(request_id)
        if request is not None:
            self._remove(request)
        return request

    def finish(self, request: Request) -> None:
        """Take a request out that has ended by itself."""
        if not request.for_cache:
            self._admission.observe(request.num_output_tokens)
        self._remove(request)

    def _remove(self, request: Request) -> None:
        """Take a request out for good, wherever it is: finished, failed, expired or cancelled."""
        if request.state is RequestState.RUNNING:
            self._running.requests.remove(request)
        elif request.state is RequestState.WAITING:
            self._waiting.remove(request)
        else:
            self._following.leave(request)
        if request.followers:
            self._waiting.add(self._following.hand_on(request))
        self._promises.forget(request)
        self._step.is_settled = False
        self._cache.release(request.blocks)
        request.state = RequestState.FINISHED
        del self._by_id[request.request_id]

    def expire(self) -> list[tuple[Request, DeadlineExceeded]]:
        """Take out every request that has become too late, waiting or running (`deadlines.py`)."""
        now_s = self._clock()
        late = too_late(list(self._by_id.values()), now_s)
        for request in late:
            self._remove(request)
        return [(r, deadline_exceeded(r, now_s)) for r in late]

    def give_up(self) -> list[tuple[Request, NeverBegan]]:
        """Take out whoever has waited for longer than anybody should and has not begun.

        Not who goes on with an answer: its client has the beginning, and is told nothing but the rest. Nor
        whose prompt another answer to it has begun on.
        """
        now_s, patience_s = self._clock(), self._entrance.patience_s
        came_before = now_s - patience_s
        waited = [r for r in self if r.admitted_s is None and not r.goes_on and r.arrival_s < came_before]
        for request in waited:
            self._remove(request)
        limit = self._entrance.max_waiting
        return [(r, NeverBegan(len(self._waiting), limit, now_s - r.arrival_s, patience_s)) for r in waited]

    # -- one step ---------------------------------------------------------------------------------

    def schedule(self) -> list[ScheduledSequence]:
        """Choose the next step and take its blocks. Empty exactly when there is nothing to do.

        Follow it with `update` or `fail_step`.
        """
        step = self.plan()
        assert step or not self._by_id, "requests are left, but none can be scheduled"
        sequences = [_scheduled(request, num_tokens) for request, num_tokens in step]
        if self._step.span is not None:
            sequences[-1] = replace(sequences[-1], layers=self._step.span)
        return sequences

    def plan(self) -> Sequence[tuple[Request, int]]:
        """`schedule` for a caller without tensors: the step as requests and their tokens, read-only.

        Empty also when nobody fits because the cache is shared with another scheduler.
        """
        self._step.compose()
        self.num_cut_steps += self._step.is_cut_short
        self.num_early_steps += self._step.has_ended_early
        return self._step.entries

    def parts_after(self, *, unseen: int) -> list[NextPart]:
        """The step after the planned one, as far as it can be said before that is done (`going_on.py`).

        unseen: steps in a row that were begun so. O(running).
        """
        return self._step.parts_after(unseen=unseen)

    def go_on(self, parts: Sequence[NextPart]) -> list[ScheduledSequence]:
        """`schedule` the step that was begun while the last one was computed.

        parts: from `parts_after`, of those who are still here, with room for their tokens.
        """
        self._step.go_on(parts)
        return [_scheduled(part.request, part.num_tokens) for part in parts]

    def quiet_steps(self) -> int:
        """How many steps would follow the planned one that only decode and leave the cache alone.

        In each of them every sequence of the plan computes one token, takes no block, fills none, and
        nobody is admitted; as long as nobody ends, comes or is cancelled. O(running).
        """
        return self._step.quiet_steps()

    def advance(self, tokens: Sequence[array[int]]) -> None:
        """The planned step and some of the quiet ones after it were computed: each request's tokens.

        All of one length, at most `quiet_steps()`. As if each had been planned and updated; what is open
        now, for `update`, is the step that follows them.
        """
        for (request, _), more in zip(self._step.entries, tokens, strict=True):
            request.token_ids.extend(more)
            request.num_computed += len(more)

    def took(self, elapsed_s: float) -> None:
        """The planned step was computed in so many seconds; for whoever has measured it, before `update`."""
        self._step.took(elapsed_s)

    def update(self, result: StepResult) -> list[Request]:
        """The step was computed: record it; the requests that got a token, which is now their last.

        The caller decides whether that token ends the request and then calls `finish`.
        """
        step = self._step.take_computed()
        self._cache.commit_step()
        self._budget.fitted()
        sampled = []
        for (request, num_tokens), token_id in zip(step, result.next_tokens, strict=True):
            request.num_computed += num_tokens
            if token_id is not None:
                if request.followers:
                    self._fork(request)
                request.token_ids.append(token_id)
                sampled.append(request)
        return sampled

    def _fork(self, leader: Request) -> None:
        """Its prompt is computed; its tenant gets no more places than if it had asked for each alone."""
        running, places = self._running, self._budget.places
        running.fork(
            leader,
            self._following.release(leader),
            lambda: self._turns.places(leader.tenant, running.requests, places),
        )

    def fail_step(self) -> list[Request]:
        """The step raised: what it registered is un-registered, its requests are taken out and returned.

        Every request that shares a block of this step is part of the step itself, since blocks are
        shared at admission only and admission schedules: so nobody else is touched.
        """
        step = self._step.take()
        self._cache.abort_step()
        for request, _ in step:
            self._remove(request)
        return [request for request, _ in step]

    def fail_some(self, places: Sequence[int]) -> list[Request]:
        """What was computed at these places of the step is of no use: their requests are taken out and
        returned. For the others it is as if the step had not been planned."""
        failed = [self._step.entries[place][0] for place in places]
        self._take_back_begun()
        for request in failed:
            self._remove(request)
        return failed

    def retreat(self) -> bool:
        """The step did not fit into memory: as if it had not been planned, the next are half as large.

        False, and nothing has changed, if it was of a single token: then it can only fail.
        """
        if not self._budget.ran_out(self._step.num_tokens):
            return False
        self._take_back_begun()
        return True

    def take_back(self) -> None:
        """The step was not begun: as if it had not been planned. Who was admitted to it waits again."""
        step = self._step.take()
        self._cache.abort_step()
        for request, num_tokens in reversed(step):
            # Blocks that were registered with it are registered no more.
            if self._step.fills_blocks(request, num_tokens):
                self._running.put_back(request)
        while len(self._running) > self._budget.places:
            self._running.put_back(self._running.requests[-1])

    def _take_back_begun(self) -> None:
        """Also a part that was halfway through the layers: who computes may have gone on with it."""
        if self._step.span is not None:
            self._step.entries[-1][0].halfway = None
        self.take_back()

    # -- what others may see ----------------------------------------------------------------------

    def __iter__(self) -> Iterator[Request]:
        """Every request not finished, in no promised order."""
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def load(self, admitted: tuple[RequestId, ...] = ()) -> Load:
        """The work here, as routers are told. admitted: taken in since they were last told. O(requests)."""
        return Load(
            queued_uncached_tokens=queued_uncached_tokens(self._running.requests, self._waiting),
            queued_attention=queued_attention(self._running.requests, self._waiting),
            queued=queued_here(self._running.requests, self._turns, self._order, self._clock()),
            num_waiting=self.num_waiting,
            num_running=len(self._running),
            context_tokens=context_tokens(self._running.requests),
            free_blocks=self._cache.num_free,
            growth_blocks=self._growth_blocks(),
            total_blocks=self._num_usable_blocks(),
            step_time=self._pace(),
            copy_block_s=self._copy_block_s(),
            admitted=admitted,
        )

    def _num_usable_blocks(self) -> int:
        """Blocks that those who run may have. A held prefix takes the same however many run: counted as
        theirs, it would make each newcomer look as if it needed its part of that, too."""
        return self._num_blocks - self._cache.stats().pinned

    def _growth_blocks(self) -> int:
        """What routers are told; nobody needs to know while half of the blocks are free and nobody waits."""
        if not self._waiting and self._cache.num_free * 2 > self._num_usable_blocks():
            return 0
        return self._admission.growth_blocks(self._running.requests)

    @property
    def num_waiting(self) -> int:
        """Those that follow included."""
        return len(self._waiting) + len(self._following)

    @property
    def step_budget(self) -> int:
        """Tokens that a step may have: less than configured for a while after memory ran out."""
        return self._budget.tokens

    @property
    def is_decoding(self) -> bool:
        """Whether a running request has part of its answer. O(running)."""
        return any([request.num_output_tokens for request in self._running.requests])

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_preemptions(self) -> int:
        """Since the start."""
        return self._running.num_preemptions

    @property
    def num_swapped(self) -> int:
        """Of those preempted, who kept what they had computed."""
        return self._running.num_swapped


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
