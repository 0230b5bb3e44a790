"""Law: a run of quiet steps advanced at once leaves scheduler and cache as the same steps one by one do."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block_hash import BlockHasher
from cache.events import StepTimeModel
from cache.kv_cache_manager import KVCacheManager
from cache.messages import SamplingParams
from cache.scheduling_order import SchedulingOrder
from cache.types import BlockHash, RequestId
from replica.output.detokenizer import Detokenizer, NoText
from replica.scheduling.request import Request
from replica.scheduling.runner import StepResult
from replica.scheduling.scheduler import Scheduler
from tests.fakes.engine import BLOCK_SIZE, fingerprint

NUM_BLOCKS = 14
MODEL = StepTimeModel(base_s=0.2, per_token_s=0.1, per_attention_s=0.001, per_sequence_s=0.1)
# Another step costs next to nothing: they end early wherever they may.
CHEAP_STEPS = StepTimeModel(base_s=0.001, per_token_s=0.1, per_attention_s=0.0, per_sequence_s=0.0)


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    num_output: int
    arrival: int  # step before which it comes
    tenant: str = ""


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    shared = draw(st.lists(st.integers(0, 3), max_size=20))
    return [
        Job(
            (*shared[: draw(st.integers(0, 20))], *draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))),
            draw(st.integers(1, 24)),
            draw(st.integers(0, 30)),
            draw(st.sampled_from(["", "", "other"])),
        )
        for _ in range(draw(st.integers(1, 6)))
    ]


class EventRecorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, BlockHash]] = []

    def stored(self, block_hash: BlockHash) -> None:
        self.events.append(("stored", block_hash))

    def removed(self, block_hash: BlockHash) -> None:
        self.events.append(("removed", block_hash))


class Driver:
    """Steps a scheduler to the end of its jobs; token `j` of every output is `j % 4`."""

    def __init__(
        self,
        workload: list[Job],
        max_batched_tokens: int,
        max_running: int,
        order: SchedulingOrder = SchedulingOrder.FIRST_COME,
        itl_target_s: float | None = math.inf,
        model: StepTimeModel = MODEL,
    ) -> None:
        self.recorder = EventRecorder()
        self.cache = KVCacheManager(
            NUM_BLOCKS, BlockHasher(fingerprint()), block_size=BLOCK_SIZE, sink=self.recorder
        )
        self.scheduler = Scheduler(
            self.cache,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=NUM_BLOCKS * BLOCK_SIZE,
            max_batched_tokens=max_batched_tokens,
            max_running=max_running,
            max_waiting=100,
            clock=lambda: 0.0,
            order=order,
            itl_target_s=itl_target_s,
            pace=lambda: model,
        )
        self.coming = sorted(enumerate(workload), key=lambda item: item[1].arrival)
        self.step_number = 0
        self.num_plans = 0
        self.ended: list[tuple[int, str, tuple[int, ...], int | None, int]] = []

    def run(self, *, at_once: bool) -> None:
        while self.coming or len(self.scheduler):
            while self.coming and self.coming[0][1].arrival <= self.step_number:
                self.submit(*self.coming.pop(0))
            self.step(at_once=at_once)
            assert self.step_number < 2000

    def submit(self, index: int, job: Job) -> None:
        tokens = array("i", job.prompt)
        params = SamplingParams(max_tokens=job.num_output)
        self.scheduler.submit(
            Request(
                request_id=RequestId(f"r{index}"),
                token_ids=tokens,
                num_prompt_tokens=len(tokens),
                max_output_tokens=job.num_output,
                sampling=params,
                seed=0,
                arrival_s=float(job.arrival),
                expires_s=None,
                blocks=self.cache.begin(tokens),
                detokenizer=Detokenizer(
                    NoText(), params, frozenset(), max_tokens=job.num_output, sent_chars=0
                ),
                tenant=job.tenant,
            )
        )

    def step(self, *, at_once: bool) -> None:
        planned = list(self.scheduler.plan())
        self.num_plans += 1
        if not planned:
            self.step_number += 1
            return
        if at_once:
            self.skip(planned)
        tokens = tuple(
            request.num_output_tokens % 4 if request.num_uncomputed == num_tokens else None
            for request, num_tokens in planned
        )
        for request in self.scheduler.update(StepResult(tokens, elapsed_s=1.0)):
            if request.num_output_tokens == request.max_output_tokens:
                self.scheduler.finish(request)
                self.ended.append(
                    (
                        self.step_number,
                        request.request_id,
                        tuple(request.token_ids),
                        request.cached_tokens,
                        request.num_preemptions,
                    )
                )
        self.step_number += 1

    def skip(self, planned: list[tuple[Request, int]]) -> None:
        """As many quiet steps as nobody ends in and nobody comes in."""
        ahead = min([self.scheduler.quiet_steps()] + [_steps_to_end(request) - 1 for request, _ in planned])
        if self.coming:
            ahead = min(ahead, self.coming[0][1].arrival - self.step_number - 1)
        if ahead > 0:
            self.scheduler.advance([_next_tokens(request, ahead) for request, _ in planned])
            self.step_number += ahead


def _steps_to_end(request: Request) -> int:
    return request.max_output_tokens - request.num_output_tokens


def _next_tokens(request: Request, count: int) -> array[int]:
    first = request.num_output_tokens
    return array("i", [number % 4 for number in range(first, first + count)])


@given(
    jobs(),
    st.integers(1, 40),
    st.integers(1, 6),
    st.sampled_from(SchedulingOrder),
    st.sampled_from([math.inf, None, 1.0]),
    st.sampled_from([MODEL, CHEAP_STEPS]),
)
@settings(max_examples=150)
def test_steps_at_once_are_the_same_steps(
    workload: list[Job],
    max_batched_tokens: int,
    max_running: int,
    order: SchedulingOrder,
    itl_target_s: float | None,
    model: StepTimeModel,
) -> None:
    """Who ends when, with which tokens, hits and preemptions; what the cache announced, in which order."""
    single = Driver(workload, max_batched_tokens, max_running, order, itl_target_s, model)
    single.run(at_once=False)
    jumping = Driver(workload, max_batched_tokens, max_running, order, itl_target_s, model)
    jumping.run(at_once=True)
    assert jumping.ended == single.ended
    assert jumping.recorder.events == single.recorder.events
    assert jumping.cache.stats() == single.cache.stats()
    assert jumping.scheduler.num_preemptions == single.scheduler.num_preemptions
    assert jumping.num_plans <= single.num_plans


def test_a_lone_decode_is_planned_twice_per_block() -> None:
    """Once to take the block, once to fill it: a test of the law alone would pass without any jump."""
    job = Job((1,), 40, 0)
    single = Driver([job], 8, 4)
    single.run(at_once=False)
    jumping = Driver([job], 8, 4)
    jumping.run(at_once=True)
    assert single.num_plans == 40
    assert jumping.num_plans == 40 * 2 // BLOCK_SIZE
