"""Laws of the queue: its order, its tenants, and the time decodes may be stalled. On the scheduler alone.

Steps are planned and timed by the step-time model that the scheduler knows, without a runner.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block_hash import BlockHasher
from cache.events import StepTimeModel
from cache.kv_cache_manager import KVCacheManager
from cache.messages import SamplingParams
from cache.priority import LEVEL_S, MAX_PRIORITY, MIN_PRIORITY
from cache.types import RequestId
from replica.output.detokenizer import Detokenizer, NoText
from replica.scheduling.order import AGING, SchedulingOrder
from replica.scheduling.request import Request, RequestState
from replica.scheduling.runner import StepResult
from replica.scheduling.scheduler import Scheduler
from replica.scheduling.step_room import limit_s
from replica.scheduling.step_time import attention_pairs
from replica.scheduling.turns import CREDIT_STEPS
from tests.fakes.engine import BLOCK_SIZE, fingerprint

MODEL = StepTimeModel(base_s=0.01, per_token_s=0.001, per_attention_s=1e-6, per_sequence_s=0.002)
BUDGET = 64
CREDIT = CREDIT_STEPS * BUDGET


@dataclass(frozen=True)
class Job:
    arrival_s: float
    num_prompt: int
    num_output: int = 1
    tenant: str = ""
    share: float = 1.0
    priority: int = 0
    expires_s: float | None = None


@dataclass
class Engine:
    """Plans and times steps; what happened, by number of job."""

    order: SchedulingOrder
    num_blocks: int = 4096
    max_running: int = 16
    itl_target_s: float | None = math.inf
    now_s: float = 0.0
    started: list[int] = field(default_factory=list)  # in the order they were first admitted
    first_token_s: dict[int, float] = field(default_factory=dict)
    ended_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = KVCacheManager(self.num_blocks, BlockHasher(fingerprint()), block_size=BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.cache,
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=1 << 20,
            max_batched_tokens=BUDGET,
            max_running=self.max_running,
            max_waiting=1000,
            clock=lambda: self.now_s,
            order=self.order,
            itl_target_s=self.itl_target_s,
            pace=lambda: MODEL,
        )
        self._number: dict[RequestId, int] = {}

    def submit(self, number: int, job: Job, *, twin_of: int | None = None) -> Request:
        """A prompt that shares nothing with any other but its twin's; of twins the hashes are sent."""
        tokens = array("i", [(number if twin_of is None else twin_of) + 7, *range(job.num_prompt - 1)])
        hasher = BlockHasher(fingerprint())
        sent = () if twin_of is None else hasher.chain(hasher.root(), tokens)
        params = SamplingParams(max_tokens=job.num_output)
        request = Request(
            request_id=RequestId(str(number)),
            token_ids=tokens,
            num_prompt_tokens=job.num_prompt,
            max_output_tokens=job.num_output,
            sampling=params,
            seed=0,
            arrival_s=job.arrival_s,
            expires_s=job.expires_s,
            blocks=self.cache.begin(tokens, block_hashes=sent),
            detokenizer=Detokenizer(NoText(), params, frozenset(), max_tokens=job.num_output, sent_chars=0),
            tenant=job.tenant,
            share=job.share,
            priority=job.priority,
        )
        self.scheduler.submit(request)
        self._number[request.request_id] = number
        return request

    def step(self) -> list[tuple[Request, int]]:
        """One step as planned: each request's tokens. Nothing is planned only where nobody is left."""
        planned = list(self.scheduler.plan())
        assert planned or not len(self.scheduler)
        for request, _ in planned:
            number = self._number[request.request_id]
            if number not in self.started:
                self.started.append(number)
        self.now_s += self.time_of(planned) if planned else 0.05
        tokens = tuple(0 if r.num_uncomputed == n else None for r, n in planned)
        for request in self.scheduler.update(StepResult(tokens, elapsed_s=0.0)):
            number = self._number[request.request_id]
            self.first_token_s.setdefault(number, self.now_s)
            if request.num_output_tokens == request.max_output_tokens:
                self.ended_s[number] = self.now_s
                self.scheduler.finish(request)
        return planned

    @staticmethod
    def time_of(planned: list[tuple[Request, int]]) -> float:
        attention = sum(attention_pairs(r.num_computed, n) for r, n in planned)
        return MODEL.step_s(sum(n for _, n in planned), attention, len(planned))

    def run(self, jobs: list[Job]) -> None:
        """To the end of all of them."""
        coming = sorted(enumerate(jobs), key=lambda item: item[1].arrival_s)
        for _ in range(20_000):
            while coming and coming[0][1].arrival_s <= self.now_s:
                self.submit(*coming.pop(0))
            if not coming and not len(self.scheduler):
                return
            self.step()
        raise AssertionError("no progress")


def own_s(job: Job) -> float:
    return MODEL.prefill_s(job.num_prompt, 0, BUDGET)


jobs_of_one = st.lists(
    st.builds(Job, st.floats(0, 20), st.integers(1, 300), st.integers(1, 12)), min_size=2, max_size=20
)
orders = st.sampled_from(SchedulingOrder)


@given(jobs_of_one, orders, st.sampled_from([80, 160, 4096]), st.integers(1, 8))
@settings(max_examples=100)
def test_nobody_is_overtaken_for_longer_than_the_bound(
    jobs: list[Job], order: SchedulingOrder, num_blocks: int, max_running: int
) -> None:
    """Who comes more than own prefill / AGING later starts later: whatever is short of places or blocks."""
    engine = Engine(order, num_blocks=num_blocks, max_running=max_running)
    engine.run(jobs)
    assert sorted(engine.started) == list(range(len(jobs)))
    place = {number: position for position, number in enumerate(engine.started)}
    for early, job in enumerate(jobs):
        patience_s = 0.0 if order is SchedulingOrder.FIRST_COME else own_s(job) / AGING
        for late, other in enumerate(jobs):
            if other.arrival_s > job.arrival_s + patience_s + 1e-9:
                assert place[early] < place[late]


@given(jobs_of_one, orders, st.integers(1, 8), st.sampled_from([math.inf, None, 0.03]))
@settings(max_examples=80)
def test_everybody_ends_whatever_the_order(
    jobs: list[Job], order: SchedulingOrder, max_running: int, itl_target_s: float | None
) -> None:
    """In a pool that holds one of the longest and little else, so that blocks end inside of prompts."""
    engine = Engine(order, num_blocks=80, max_running=max_running, itl_target_s=itl_target_s)
    engine.run(jobs)
    assert len(engine.ended_s) == len(jobs)
    stats = engine.cache.stats()
    assert (stats.used, stats.free) == (0, stats.total)


@given(st.lists(st.integers(1, 300), min_size=2, max_size=12, unique=True))
def test_shortest_first_is_the_order_of_length(lengths: list[int]) -> None:
    """Of those that come together, when one place is free at a time."""
    engine = Engine(SchedulingOrder.SHORTEST, max_running=1)
    engine.run([Job(0.0, length) for length in lengths])
    assert [lengths[number] for number in engine.started] == sorted(lengths)


def test_a_long_prompt_stands_back_and_keeps_its_blocks() -> None:
    """With preemption a short one is computed in the next step; without, after the long one's last chunk."""
    ended = {}
    for order in SchedulingOrder:
        engine = Engine(order)
        long = engine.submit(0, Job(0.0, 10 * BUDGET))
        engine.step()
        engine.submit(1, Job(engine.now_s, 20))
        held = list(long.blocks.block_table)
        engine.step()
        assert long.blocks.block_table[: len(held)] == held
        assert long.num_preemptions == 0
        while len(engine.scheduler):
            engine.step()
        ended[order] = (engine.first_token_s[1], engine.first_token_s[0])
    short_first, long_last = ended[SchedulingOrder.SHORTEST_PREEMPTING]
    assert short_first < ended[SchedulingOrder.SHORTEST][0] / 4
    assert ended[SchedulingOrder.SHORTEST] == ended[SchedulingOrder.FIRST_COME]
    assert long_last <= ended[SchedulingOrder.SHORTEST][1] + MODEL.step_s(BUDGET, 1e4, 2)


# -- priorities and deadlines ---------------------------------------------------------------------

urgent_jobs = st.lists(
    st.builds(
        Job,
        st.floats(0, 60),
        st.integers(1, 300),
        st.integers(1, 12),
        priority=st.integers(-2, 2) | st.integers(MIN_PRIORITY, MAX_PRIORITY),
    ),
    min_size=2,
    max_size=20,
)


@given(urgent_jobs, orders, st.sampled_from([80, 160, 4096]), st.integers(1, 8))
@settings(max_examples=100)
def test_priority_overtakes_by_its_seconds_and_no_more(
    jobs: list[Job], order: SchedulingOrder, num_blocks: int, max_running: int
) -> None:
    """Who comes so many seconds later that no level makes up for them starts later: so nobody starves."""
    engine = Engine(order, num_blocks=num_blocks, max_running=max_running)
    engine.run(jobs)
    place = {number: position for position, number in enumerate(engine.started)}
    for early, job in enumerate(jobs):
        patience_s = 0.0 if order is SchedulingOrder.FIRST_COME else own_s(job) / AGING
        for late, other in enumerate(jobs):
            lead_s = max(0.0, patience_s + LEVEL_S * (job.priority - other.priority))
            # A job is put here at the end of the step that it comes in, of half a second at most.
            if other.arrival_s > job.arrival_s + lead_s + 0.5:
                assert place[early] < place[late]


@given(st.lists(st.integers(MIN_PRIORITY, MAX_PRIORITY), min_size=2, max_size=12, unique=True), orders)
def test_of_those_that_wait_the_most_urgent_goes_first(levels: list[int], order: SchedulingOrder) -> None:
    engine = Engine(order, max_running=1)
    engine.run([Job(0.0, 40, priority=level) for level in levels])
    assert [levels[number] for number in engine.started] == sorted(levels)


def test_a_begun_prompt_stands_back_for_a_more_urgent_one_and_keeps_its_blocks() -> None:
    """Not for one that is as urgent: and nobody who runs is thrown out for it."""
    for level, comes_first in ((0, False), (-1, True), (1, False)):
        engine = Engine(SchedulingOrder.FIRST_COME)
        long = engine.submit(0, Job(0.0, 10 * BUDGET))
        engine.step()
        engine.submit(1, Job(engine.now_s, 20, priority=level))
        held = list(long.blocks.block_table)
        engine.step()
        assert long.blocks.block_table[: len(held)] == held
        assert (1 in engine.first_token_s) is comes_first
        while len(engine.scheduler):
            engine.step()
        assert long.num_preemptions == 0


def test_an_urgent_twin_does_not_wait_for_who_is_less_urgent() -> None:
    """It finds nothing cached then, and computes the prompt itself."""
    engine = Engine(SchedulingOrder.FIRST_COME, max_running=1)
    engine.submit(0, Job(0.0, 40))
    engine.step()
    engine.submit(1, Job(0.0, 4, 100))  # keeps the only place for a while
    later = engine.submit(2, Job(0.0, 40, priority=5), twin_of=2)
    twin = engine.submit(3, Job(0.0, 40), twin_of=2)
    assert twin.expected_hit > 0
    while 3 not in engine.started:
        engine.step()
    assert twin.cached_tokens == 0
    assert 2 not in engine.started
    assert later.state is RequestState.WAITING


@given(st.lists(st.tuples(st.integers(20, 300), st.floats(0.05, 3.0)), min_size=1, max_size=12))
def test_who_cannot_be_answered_in_time_is_told_before_it_is_begun(sizes: list[tuple[int, float]]) -> None:
    """And nobody is told who could start in time: by what steps take, which here is what they take.

    Nor is the last one that is here."""
    engine = Engine(SchedulingOrder.FIRST_COME, max_running=1)
    jobs = [Job(0.0, length, expires_s=left_s) for length, left_s in sizes]
    requests = [engine.submit(number, job) for number, job in enumerate(jobs)]
    while len(engine.scheduler):
        for request, error in engine.scheduler.expire():
            number, job = requests.index(request), jobs[requests.index(request)]
            assert job.expires_s is not None
            if number not in engine.started:
                assert engine.now_s + own_s(job) >= job.expires_s - 1e-9
                assert error.deadline_s == job.expires_s
                assert (error.prefill_s is None) == (engine.now_s >= job.expires_s)
        waiting = [r for r in requests if r.state is RequestState.WAITING and r.admitted_s is None]
        for request in waiting:
            job = jobs[requests.index(request)]
            assert job.expires_s is not None
            assert engine.now_s + own_s(job) < job.expires_s or len(engine.scheduler) == 1
        if len(engine.scheduler):
            engine.step()


def test_steps_believed_too_slow_for_every_deadline_are_tried_again() -> None:
    """One at a time: else nothing would ever be begun that could prove them quicker."""
    engine = Engine(SchedulingOrder.FIRST_COME)
    hopeless = Job(0.0, 200, expires_s=0.2)
    assert own_s(hopeless) > 0.2
    for number in range(3):
        engine.submit(number, hopeless)
    told = {request.request_id for request, _ in engine.scheduler.expire()}
    assert told == {"1", "2"}
    engine.step()
    assert engine.started == [0]
    engine.submit(3, hopeless)
    assert [request.request_id for request, _ in engine.scheduler.expire()] == ["3"]  # somebody else runs


# -- tenants --------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 200)), min_size=8, max_size=60),
    orders,
    st.integers(2, 40),
)
@settings(max_examples=80)
def test_tenants_that_both_wait_get_equal_parts(
    sizes: list[tuple[int, int]], order: SchedulingOrder, num_steps: int
) -> None:
    """Computed tokens of two that always had somebody waiting differ by a request and a step at most."""
    engine = Engine(order, max_running=1000)
    requests = [
        engine.submit(number, Job(0.0, length, tenant=str(tenant)))
        for number, (tenant, length) in enumerate(sizes)
    ]
    computed = dict.fromkeys("0123", 0)
    for _ in range(num_steps):
        for request, num_tokens in engine.step():
            computed[request.tenant] += num_tokens
        waiting = {r.tenant for r in requests if r.state is RequestState.WAITING}
        if not len(engine.scheduler):
            break
        for one in waiting:
            for other in waiting:
                assert abs(computed[one] - computed[other]) <= 200 + BUDGET + CREDIT


@given(st.sampled_from([0.5, 2.0, 5.0]), orders)
def test_tenants_get_by_their_shares(share: float, order: SchedulingOrder) -> None:
    engine = Engine(order, max_running=1000)
    for number in range(400):
        each = Job(0.0, BUDGET, tenant="ab"[number % 2], share=share if number % 2 else 1.0)
        engine.submit(number, each)
    computed = {"a": 0, "b": 0}
    for _ in range(150):
        for request, num_tokens in engine.step():
            computed[request.tenant] += num_tokens
    assert abs(computed["b"] / share - computed["a"]) <= (1 + 1 / share) * (BUDGET + CREDIT)
    assert abs(computed["b"] / computed["a"] / share - 1) < 0.4


@given(st.integers(1, 10), orders)
def test_what_a_tenant_did_not_use_is_gone(num_idle: int, order: SchedulingOrder) -> None:
    """Who comes after the others have had much gets its part from then on, not all until it has caught up."""
    engine = Engine(order, max_running=1000)
    for number in range(40):
        engine.submit(number, Job(0.0, 2 * BUDGET, tenant="busy"))
    for _ in range(num_idle):
        engine.step()
    for number in range(40, 60):
        engine.submit(number, Job(0.0, 2 * BUDGET, tenant="late"))
    computed = {"busy": 0, "late": 0}
    for _ in range(20):
        for request, num_tokens in engine.step():
            computed[request.tenant] += num_tokens
    assert abs(computed["busy"] - computed["late"]) <= 2 * BUDGET + CREDIT


def test_a_tenant_is_not_charged_for_what_is_cached_nor_twice() -> None:
    engine = Engine(SchedulingOrder.FIRST_COME)
    shares = engine.scheduler._turns._shares
    engine.submit(0, Job(0.0, 40, tenant="a"))
    engine.step()
    engine.submit(0, Job(0.0, 40, tenant="b"))  # the same tokens: all but the last block are there
    engine.step()
    assert shares._charged == {"a": 40, "b": BLOCK_SIZE}


def test_what_a_tenant_has_had_is_remembered_while_nobody_waits() -> None:
    """Before an engine stands a Router, which lets few wait: its queue is empty between any two of them."""
    engine = Engine(SchedulingOrder.FIRST_COME)
    for number in range(3):
        engine.submit(number, Job(0.0, 40, tenant="much"))
        while len(engine.scheduler):
            engine.step()
    engine.submit(3, Job(0.0, 2 * BUDGET, tenant="much"))
    engine.submit(4, Job(0.0, 2 * BUDGET, tenant="little"))
    assert [request.tenant for request, _ in engine.step()] == ["little"]


# -- stalls ---------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(2, 40)), min_size=1, max_size=8),
    st.integers(1, 400),
    st.sampled_from([None, 0.05, 0.2]),
)
@settings(max_examples=80)
def test_a_long_prompt_stalls_decodes_for_no_longer_than_the_limit(
    answers: list[tuple[int, int]], length: int, itl_target_s: float | None
) -> None:
    """Or for a block of tokens, where not even that fits. And its prefill ends."""
    engine = Engine(SchedulingOrder.FIRST_COME, itl_target_s=itl_target_s)
    for number, (num_prompt, num_output) in enumerate(answers):
        engine.submit(number, Job(0.0, num_prompt, num_output))
    for _ in range(10):
        engine.step()
    long = engine.submit(99, Job(engine.now_s, length))
    while long.state is not RequestState.FINISHED:
        planned = engine.scheduler.plan()
        decodes = [(r, n) for r, n in planned if r is not long]
        chunk = next((n for r, n in planned if r is long), 0)
        alone_s = engine.time_of(decodes)
        step_s = engine.time_of(list(planned))
        if decodes and all(r.is_decoding for r, _ in decodes) and chunk > BLOCK_SIZE:
            assert step_s <= limit_s(alone_s, 1, itl_target_s) + 1e-9
        if all(r.is_decoding for r, _ in decodes):
            assert chunk > 0, "who is alone with decodes goes on in every step"
        tokens = tuple(0 if r.num_uncomputed == n else None for r, n in planned)
        for request in engine.scheduler.update(StepResult(tokens, elapsed_s=0.0)):
            if request.num_output_tokens == request.max_output_tokens:
                engine.scheduler.finish(request)


@pytest.mark.parametrize("num_decodes", [0, 8])
def test_without_decodes_or_without_a_limit_steps_are_full(num_decodes: int) -> None:
    engine = Engine(SchedulingOrder.FIRST_COME, itl_target_s=None if num_decodes == 0 else math.inf)
    for number in range(num_decodes):
        engine.submit(number, Job(0.0, 2, 50))
    engine.step()
    engine.submit(99, Job(0.0, 1000))
    assert sum(n for _, n in engine.step()) == BUDGET


def test_more_prompts_are_given_more_time() -> None:
    """So that capacity is not given up: where many wait, steps are as large as they may be."""
    sizes = []
    for num_prompts in (1, 2, 4, 40):
        engine = Engine(SchedulingOrder.FIRST_COME, itl_target_s=None)
        for number in range(4):
            engine.submit(number, Job(0.0, 2, 50))
        engine.step()
        for number in range(10, 10 + num_prompts):
            engine.submit(number, Job(0.0, 500))
        sizes.append(sum(n for _, n in engine.step()))
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[1] < sizes[-1] == BUDGET
