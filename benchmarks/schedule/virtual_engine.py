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
from cache.events import StepTimeModel
from cache.fingerprint import Fingerprint, HashAlgorithm
from cache.kv_cache_manager import KVCacheManager
from cache.messages import SamplingParams
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


def run(jobs: Sequence[Job], model: StepTimeModel, *, num_blocks: int, until_s: float = math.inf) -> Outcome:
    """Serve these jobs, in order of arrival, with the shipped settings, until all are done or it is time."""
    now_s = 0.0
    config = ReplicaConfig()
    mark = Fingerprint("virtual", "", "virtual", "", config.block_size, HashAlgorithm.XXH3_128)
    cache = KVCacheManager(num_blocks, BlockHasher(mark), block_size=config.block_size, prefix_caching=False)
    scheduler = Scheduler(
        cache,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=1 << 20,
        max_batched_tokens=config.max_batched_tokens,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        max_wait_s=math.inf if config.max_wait_s is None else config.max_wait_s,
        clock=lambda: now_s,
        itl_target_s=config.itl_target_s,
        pace=lambda: model,
    )
    first_token_s = [math.inf] * len(jobs)
    index, num_ended = 0, 0
    while now_s < until_s and (index < len(jobs) or len(scheduler)):
        while index < len(jobs) and jobs[index].arrival_s <= now_s:
            _submit(scheduler, cache, index, jobs[index])
            index += 1
        planned = scheduler.plan()
        if not planned:
            if index == len(jobs):
                break
            now_s = max(now_s, jobs[index].arrival_s)
            continue
        attention = sum([attention_pairs(r.num_computed, n) for r, n in planned])
        now_s += model.step_s(sum([n for _, n in planned]), attention, len(planned))
        tokens = tuple([0 if r.num_uncomputed == n else None for r, n in planned])
        for request in scheduler.update(StepResult(tokens, elapsed_s=0.0)):
            number = int(request.request_id)
            if request.num_output_tokens == 1:
                first_token_s[number] = now_s - jobs[number].arrival_s
            if request.num_output_tokens == request.max_output_tokens:
                scheduler.finish(request)
                num_ended += 1
    return Outcome(tuple(first_token_s), num_ended, now_s)


def _submit(scheduler: Scheduler, cache: KVCacheManager, number: int, job: Job) -> None:
    """Take it in, unless there is no room for it."""
    name = RequestId(str(number))
    try:
        scheduler.check_room(name, job.num_prompt_tokens, job.num_output_tokens, tenant=job.tenant)
    except QueueFull:
        return
    tokens = array("i", bytes(4 * job.num_prompt_tokens))
    scheduler.submit(
        Request(
            request_id=name,
            token_ids=tokens,
            num_prompt_tokens=job.num_prompt_tokens,
            max_output_tokens=job.num_output_tokens,
            sampling=_SAMPLING,
            seed=0,
            arrival_s=job.arrival_s,
            expires_s=None,
            blocks=cache.begin(tokens),
            detokenizer=_NO_TEXT,
            tenant=job.tenant,
        )
    )
