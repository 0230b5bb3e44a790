"""Which tokens of which requests are computed in the next step.

No prefill or decode phases: each running request has some tokens to compute, one if it decodes,
many if it prefills, and a step is {request: tokens this step} within one budget. Decodes come first; what
they leave goes to prompts, begun or waiting, by whose turn it is (`tenant_shares.py`), then in the chosen
order (`order.py`), and no more of them than the decodes may be stalled for (`step_room.py`).
Knows token counts and blocks; knows neither tensors nor text nor sampling. Engine thread only.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Iterator, Sequence

from cache.errors import NoFreeBlocks
from cache.events import Load, StepTimeModel
from cache.kv_cache_manager import PrefixHit
from cache.prefix_cache import PrefixCache
from cache.types import RequestId
from replica.errors import (
    DeadlineExceeded,
    InvalidRequest,
)
from replica.scheduling.admission import Admission
from replica.scheduling.entrance import Entrance
from replica.scheduling.load_account import (
    context_tokens,
    queued_attention,
    queued_by_tenant,
    queued_uncached_tokens,
)
from replica.scheduling.order import SchedulingOrder
from replica.scheduling.promises import Promises
from replica.scheduling.request import Request, RequestState
from replica.scheduling.runner import ScheduledSequence, StepResult
from replica.scheduling.step_budget import StepBudget
from replica.scheduling.step_room import StepRoom
from replica.scheduling.turns import Turns


class Scheduler:
    """`running` is in order of admission; who waits is in an order that only those change who came before.

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
        order: SchedulingOrder = SchedulingOrder.FIRST_COME,
        itl_target_s: float | None = math.inf,
        pace: Callable[[], StepTimeModel | None] = lambda: None,
    ) -> None:
        """max_waiting, max_wait_s: beyond either of them nobody is put behind those that wait.

        itl_target_s: as `step_room.limit_s` has it. pace: what steps take, as far as that is known.
        """
        self._cache = cache
        self._num_blocks = num_blocks
        self._block_size = block_size
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
        self._itl_target_s = itl_target_s
        self._pace = pace
        self._running: list[Request] = []
        self._turns = Turns(order, max_batched_tokens)
        self._waiting = self._turns.waiting
        self._step: list[tuple[Request, int]] = []  # the step being computed: request, its tokens
        self._started: list[Request] = []  # of those, who was admitted to it
        self._by_id: dict[RequestId, Request] = {}
        self._following: dict[RequestId, Request] = {}  # who follows whom
        self._admission = Admission(cache, num_blocks=num_blocks, block_size=block_size)
        self._promises = Promises(cache, block_size=block_size)
        self._budget = StepBudget(max_batched_tokens, max_running)
        self._numbers = itertools.count()
        self._has_preempted = False  # in the step being computed
        self._is_cut_short = False  # it could have held more of a prompt, but for the decodes' sake
        self.num_preemptions = 0  # since the start
        self.num_cut_steps = 0  # likewise: that were cut short

    # -- taking requests in and out ---------------------------------------------------------------

    def check_room(
        self,
        request_id: RequestId,
        num_prompt_tokens: int,
        max_output_tokens: int,
        *,
        tenant: str = "",
        is_retry: bool = False,
    ) -> None:
        """Raise why a request of this size cannot be taken in; changes nothing. O(requests).

        max_output_tokens: already cut to the model's length limit, at least 1 if the prompt fits.
        is_retry: it has waited elsewhere, and may have begun to answer: it may wait here, however long.
        """
        if request_id in self._by_id:
            raise InvalidRequest("request_id", f"{request_id!r} is being served here already")
        self._entrance.check_size(num_prompt_tokens, max_output_tokens)
        self._entrance.check_places(self._waiting, tenant)
        if self._waiting and not is_retry:
            queued = queued_by_tenant(self._running, self._waiting)
            self._entrance.check_wait(self.load(), queued, self._waiting, tenant)

    def submit(self, request: Request, followers: Sequence[Request] = ()) -> None:
        """Put a request that passed `check_room` among those that wait.

        followers: other answers to the same prompt, none of which has begun. They start when it has been
        computed, on the same blocks; where those are too few for one of them, it waits as any other.
        """
        expected = self._promises.expect(request)
        request.expected_hit = expected.num_tokens
        order = self._order.place(
            uncached_tokens=len(request.token_ids) - request.expected_hit,
            cached_tokens=request.expected_hit,
            arrival_s=request.arrival_s,
            pace=self._pace(),
            max_batched_tokens=self._max_batched_tokens,
        )
        # What it is to find has to be computed first: before that it is not as short as it seems.
        if expected.promiser is not None:
            order = max(order, expected.promiser.place[0])
        for each in (request, *followers):
            each.place = (order, next(self._numbers))
        self._by_id[request.request_id] = request
        self._waiting.add(request)
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
        """It leaves before its prompt is computed: the next answer leads, in the same place."""
        heir, *others = leader.followers
        leader.followers = []
        del self._following[heir.request_id]
        heir.state = RequestState.WAITING
        heir.expected_hit = leader.expected_hit
        self._waiting.add(heir)
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
        self._has_preempted = self._is_cut_short = False
        self._started.clear()
        self._schedule_decodes()
        self._schedule_prompts()
        self.num_cut_steps += self._is_cut_short
        return self._step

    def quiet_steps(self) -> int:
        """How many steps would follow the planned one that only decode and leave the cache alone.

        In each of them every sequence of the plan computes one token, takes no block, fills none, and
        nobody is admitted; as long as nobody ends, comes or is cancelled. O(running).
        """
        if self._has_preempted or self._is_cut_short:  # the next step admits again
            return 0
        if len(self._step) < len(self._running):  # the next one may have blocks for who was left out
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

    def retreat(self) -> bool:
        """The step did not fit into memory: as if it had not been planned, the next are half as large.

        False, and nothing has changed, if it was of a single token: then it can only fail.
        """
        if not self._budget.ran_out(sum([num_tokens for _, num_tokens in self._step])):
            return False
        step, self._step = self._step, []
        self._cache.abort_step()
        for request, num_tokens in reversed(step):
            if self._is_built_on(request, num_tokens):
                self._put_back(request)
        while len(self._running) > self._budget.places:
            self._put_back(self._running[-1])
        return True

    def _is_built_on(self, request: Request, num_tokens: int) -> bool:
        """Whether blocks that were registered with the step now open are part of it: these are no more."""
        size, start = self._block_size, request.num_computed
        fills = bool(request.blocks.root) and (start + num_tokens) // size > start // size
        return fills or any(request is started for started in self._started)

    # -- parts of a step --------------------------------------------------------------------------

    def _schedule_decodes(self) -> None:
        """A token for everybody who decodes, oldest first."""
        for request in self._running[:]:
            if request.state is RequestState.RUNNING and request.is_decoding:
                held = len(request.blocks.block_table)
                if self._make_room(request, 1):
                    self._step.append((request, 1))
                    # Block by block, so that in quiet steps nobody's share changes.
                    if len(request.blocks.block_table) > held:
                        self._turns.charge(request, len(request.token_ids))

    def _schedule_prompts(self) -> None:
        """Parts of prompts, begun ones and waiting ones, while budget, time, places and blocks last."""
        begun = [r for r in self._running if not r.is_decoding]
        self._turns.begin_step(begun)
        if not begun and not self._waiting:
            return
        budget = self._budget.tokens - len(self._step)
        room, places = self._room(len(begun) + len(self._waiting)), self._budget.places
        admits, without = True, set[str]()
        while budget > 0 and not room.is_full:
            # Blocks were short a moment ago: whoever came in now would be the next to be thrown out.
            may_start = admits and not self._has_preempted
            request = self._turns.next(begun, admits=may_start, without=without)
            if request is None:
                return
            if request.state is RequestState.RUNNING:
                begun.remove(request)
                budget -= self._go_on(request, budget, room)
            elif not self._has_place(request, self._turns.places(request.tenant, self._running, places)):
                if self._has_place(request, places):  # it is its tenant's own sequences that it waits for
                    without.add(request.tenant)
                else:
                    admits = False
            elif (hit := self._admission.hit(request, self._running)) is not None:
                budget -= self._admit(request, hit, budget, room)
            else:  # nobody else may start in its place: else it might wait for ever
                admits = False

    def _go_on(self, request: Request, budget: int, room: StepRoom) -> int:
        """The next part of a prompt that has begun; its tokens in this step."""
        num_tokens = self._part(request, request.num_computed, budget, room)
        if not num_tokens or not self._make_room(request, num_tokens):
            return 0
        self._compute(request, num_tokens, room)
        return num_tokens

    def _admit(self, request: Request, hit: PrefixHit, budget: int, room: StepRoom) -> int:
        """Start on what the cache does not hold of it; its tokens in this step."""
        num_tokens = self._part(request, hit.num_tokens, budget, room)
        if num_tokens:
            self._cache.admit(request.blocks, hit, num_tokens)
            self._start(request, hit.num_tokens)
            self._compute(request, num_tokens, room)
        return num_tokens

    def _part(self, request: Request, start: int, budget: int, room: StepRoom) -> int:
        wanted = min(len(request.token_ids) - start, budget)
        num_tokens = room.fits(start, wanted)
        self._is_cut_short |= num_tokens < wanted
        return num_tokens

    def _compute(self, request: Request, num_tokens: int, room: StepRoom) -> None:
        """Let so many tokens of its prompt be part of the step. Its blocks are there."""
        self._step.append((request, num_tokens))
        self._turns.charge(request, request.num_computed + num_tokens)
        room.take(request.num_computed, num_tokens)

    def _room(self, num_prompts: int) -> StepRoom:
        """What the decodes of this step leave to so many prompts, budget and blocks aside."""
        decodes = [request for request, _ in self._step]
        return StepRoom.beside(
            self._pace() if decodes else None,
            num_decodes=len(decodes),
            context_tokens=context_tokens(decodes),
            num_prompts=num_prompts,
            itl_target_s=self._itl_target_s,
            least=self._block_size,
        )

    def _has_place(self, request: Request, places: int) -> bool:
        return self._admission.has_place(request, self._running, places)

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Give a request its blocks, at the cost of the newest.

        False when it was itself the newest, or all that are newer are part of this step already: then it
        stands back until the next one.
        """
        while not self._try_grow(request, num_tokens):
            victim = self._running[-1]
            if any(victim is scheduled for scheduled, _ in self._step):
                return False
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _fork(self, leader: Request) -> None:
        """Its prompt is computed: those that follow start on it, each with the last prompt token to compute
        again, for a first token of its own. Who finds no place or no block waits, where its leader did.
        """
        followers, leader.followers = leader.followers, []
        place = self._running.index(leader) + 1
        for follower in followers:
            del self._following[follower.request_id]
            follower.cached_tokens, follower.admitted_s = leader.cached_tokens, leader.admitted_s
            if self._try_fork(leader, follower):
                follower.state = RequestState.RUNNING
                self._running.insert(place, follower)
                place += 1
            else:
                follower.state = RequestState.WAITING
                self._waiting.add(follower)

    def _try_fork(self, leader: Request, follower: Request) -> bool:
        num_tokens = leader.num_prompt_tokens - 1
        if not num_tokens or len(self._running) >= self._budget.places:
            return False
        try:
            self._cache.fork(leader.blocks, follower.blocks, num_tokens)
        except NoFreeBlocks:
            return False
        follower.num_computed = follower.num_charged = num_tokens
        return True

    def _start(self, request: Request, hit_tokens: int) -> None:
        self._waiting.remove(request)
        request.state = RequestState.RUNNING
        request.num_computed = hit_tokens
        request.num_charged = max(request.num_charged, hit_tokens)
        if request.cached_tokens is None:
            request.cached_tokens = min(hit_tokens, request.num_prompt_tokens)
            request.admitted_s = self._clock()
        self._running.append(request)
        self._started.append(request)

    def _try_grow(self, request: Request, num_tokens: int) -> bool:
        try:
            self._cache.grow(request.blocks, request.num_computed + num_tokens)
        except NoFreeBlocks:
            return False
        return True

    def _preempt(self, victim: Request) -> None:
        """Put the newest running request back among those that wait, with nothing computed.

        It has no part in this step yet. (A scheduled one has registered blocks that would then never be
        computed.)
        """
        assert victim is self._running[-1]
        assert all(victim is not scheduled for scheduled, _ in self._step)
        self._has_preempted = True
        self._put_back(victim)

    def _put_back(self, victim: Request) -> None:
        self._running.remove(victim)
        self._cache.release(victim.blocks)
        victim.state = RequestState.WAITING
        victim.num_computed = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(victim)

    # -- what others may see ----------------------------------------------------------------------

    def __iter__(self) -> Iterator[Request]:
        """Every request not finished, in no promised order."""
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def load(self, admitted: tuple[RequestId, ...] = ()) -> Load:
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
            step_time=self._pace(),
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
    def step_budget(self) -> int:
        """Tokens that a step may have: less than configured for a while after memory ran out."""
        return self._budget.tokens

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
