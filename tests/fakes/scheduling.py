"""An engine that only schedules: steps are planned and timed by the step-time model that the scheduler knows.

Without a runner.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

from hypothesis import strategies as st

from cache.block_hash import BlockHasher
from cache.events import StepTimeModel
from cache.kv_cache_manager import KVCacheManager
from cache.messages import SamplingParams
from cache.scheduling_order import SchedulingOrder
from cache.types import RequestId
from replica.output.detokenizer import Detokenizer, NoText
from replica.scheduling.request import Request
from replica.scheduling.runner import StepResult
from replica.scheduling.scheduler import Scheduler
from replica.scheduling.step_time import attention_pairs
from tests.fakes.engine import BLOCK_SIZE, fingerprint

MODEL = StepTimeModel(base_s=0.01, per_token_s=0.001, per_attention_s=1e-6, per_sequence_s=0.002)
BUDGET = 64  # tokens of a step
orders = st.sampled_from(SchedulingOrder)


@dataclass(frozen=True)
class Job:
    arrival_s: float
    num_prompt: int
    num_output: int = 1
    tenant: str = ""
    share: float = 1.0
    priority: int = 0
    expires_s: float | None = None
    waited_s: float = 0.0  # at a Router, before it arrived


@dataclass
class Engine:
    """Plans and times steps; what happened, by number of job."""

    order: SchedulingOrder
    num_blocks: int = 4096
    max_running: int = 16
    itl_target_s: float | None = math.inf
    num_layers: int = 1
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
            num_layers=self.num_layers,
            itl_target_s=self.itl_target_s,
            pace=lambda: MODEL,
        )
        self._requests: dict[RequestId, Request] = {}

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
            waited_s=job.waited_s,
            expires_s=job.expires_s,
            blocks=self.cache.begin(tokens, block_hashes=sent),
            detokenizer=Detokenizer(NoText(), params, frozenset(), max_tokens=job.num_output, sent_chars=0),
            tenant=job.tenant,
            share=job.share,
            priority=job.priority,
        )
        self.scheduler.submit(request)
        self._requests[request.request_id] = request
        return request

    def step(self) -> list[tuple[Request, int]]:
        """One step as planned: each request's tokens. Nothing is planned only where nobody is left."""
        sequences = self.scheduler.schedule()
        planned = [(self._requests[each.request_id], each.num_new_tokens) for each in sequences]
        for request, _ in planned:
            number = int(request.request_id)
            if number not in self.started:
                self.started.append(number)
        self.now_s += self.time_of(planned) if planned else 0.05
        tokens = tuple(0 if each.samples else None for each in sequences)
        for request in self.scheduler.update(StepResult(tokens, elapsed_s=0.0)):
            number = int(request.request_id)
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
