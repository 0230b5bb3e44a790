"""The scheduler under a virtual clock: steps take what a step-time model says, and nothing is computed.

Requests have lengths and tenants, and share nothing. Knows neither routers nor runners.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from cache.block_hash import BlockHasher
from cache.errors import QueueFull
from cache.events import Load, StepTimeModel
from cache.fingerprint import Fingerprint, HashAlgorithm
from cache.kv_cache_manager import KVCacheManager
from cache.messages import SamplingParams
from cache.scheduling_order import SchedulingOrder
from cache.types import RequestId
from replica.config import ReplicaConfig
from replica.output.detokenizer import Detokenizer, NoText
from replica.scheduling.request import Request
from replica.scheduling.runner import StepResult
from replica.scheduling.scheduler import Scheduler
from replica.scheduling.step_time import attention_pairs

_SAMPLING = SamplingParams(max_tokens=1)
_NO_TEXT = Detokenizer(NoText(), _SAMPLING, frozenset(), max_tokens=1, sent_chars=0)


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    sender: str  # who sent it
    tenant: str  # as whom the engine knows the sender


@dataclass(frozen=True, slots=True)
class Outcome:
    first_token_s: tuple[float, ...]  # from arrival; per job, inf for those that were refused or not begun
    num_ended: int
    now_s: float  # when it stopped


class VirtualEngine:
    """One scheduler with the shipped settings; `now_s` is moved by steps, or by whoever waits."""

    def __init__(self, jobs: Sequence[Job], model: StepTimeModel, *, num_blocks: int) -> None:
        """jobs: those that may be submitted, by number."""
        config = ReplicaConfig()
        self.now_s = 0.0
        self.block_size, self.max_batched_tokens = config.block_size, config.max_batched_tokens
        self._jobs = jobs
        self._model = model
        mark = Fingerprint("virtual", "", "virtual", "", config.block_size, HashAlgorithm.XXH3_128)
        self._cache = KVCacheManager(
            num_blocks, BlockHasher(mark), block_size=config.block_size, prefix_caching=False
        )
        self.scheduling_order = SchedulingOrder(config.scheduling_order)
        self._scheduler = Scheduler(
            self._cache,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=1 << 20,
            max_batched_tokens=config.max_batched_tokens,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            max_wait_s=math.inf if config.max_wait_s is None else config.max_wait_s,
            clock=lambda: self.now_s,
            order=self.scheduling_order,
            itl_target_s=config.itl_target_s,
            pace=lambda: model,
        )
        self._first_token_s = [math.inf] * len(jobs)
        self._num_ended = 0
        self._admitted: list[RequestId] = []  # since `load` was last asked
        self.answered: list[int] = []  # jobs whose first token came with the last step

    @property
    def has_work(self) -> bool:
        return len(self._scheduler) > 0

    def submit(self, number: int) -> bool:
        """Take it in; False if there is no room for it."""
        job, name = self._jobs[number], RequestId(str(number))
        try:
            self._scheduler.check_room(job.num_prompt_tokens, job.num_output_tokens, tenant=job.tenant)
        except QueueFull:
            return False
        tokens = array("i", bytes(4 * job.num_prompt_tokens))
        self._scheduler.submit(
            Request(
                request_id=name,
                token_ids=tokens,
                num_prompt_tokens=job.num_prompt_tokens,
                max_output_tokens=job.num_output_tokens,
                sampling=_SAMPLING,
                seed=0,
                arrival_s=job.arrival_s,
                expires_s=None,
                blocks=self._cache.begin(tokens),
                detokenizer=_NO_TEXT,
                tenant=job.tenant,
            )
        )
        self._admitted.append(name)
        return True

    def step(self) -> list[int]:
        """Compute one step; the jobs that ended with it. Somebody has to be here."""
        planned = self._scheduler.plan()
        attention = sum([attention_pairs(r.num_computed, n) for r, n in planned])
        self.now_s += self._model.step_s(sum([n for _, n in planned]), attention, len(planned))
        tokens = tuple([0 if r.num_uncomputed == n else None for r, n in planned])
        ended: list[int] = []
        self.answered.clear()
        for request in self._scheduler.update(StepResult(tokens, elapsed_s=0.0)):
            number = int(request.request_id)
            if request.num_output_tokens == 1:
                self._first_token_s[number] = self.now_s - self._jobs[number].arrival_s
                self.answered.append(number)
            if request.num_output_tokens == request.max_output_tokens:
                self._scheduler.finish(request)
                ended.append(number)
        self._num_ended += len(ended)
        return ended

    def load(self) -> Load:
        """As a Router is told, with who came since the last."""
        admitted, self._admitted = tuple(self._admitted), []
        return self._scheduler.load(admitted)

    def outcome(self) -> Outcome:
        return Outcome(tuple(self._first_token_s), self._num_ended, self.now_s)


def run(jobs: Sequence[Job], model: StepTimeModel, *, num_blocks: int, until_s: float = math.inf) -> Outcome:
    """Serve these jobs, in order of arrival, with the shipped settings, until all are done or it is time."""
    engine, index = VirtualEngine(jobs, model, num_blocks=num_blocks), 0
    while engine.now_s < until_s and (index < len(jobs) or engine.has_work):
        while index < len(jobs) and jobs[index].arrival_s <= engine.now_s:
            engine.submit(index)
            index += 1
        if engine.has_work:
            engine.step()
        elif index < len(jobs):
            engine.now_s = max(engine.now_s, jobs[index].arrival_s)
    return engine.outcome()
