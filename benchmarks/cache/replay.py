"""One engine's worth of requests through production's scheduler, under a virtual clock and any cache.

A step takes what the simulated machine's model says; tokens are the jobs' own. What runs together, what waits
and what is preempted is therefore as it would be, and follows from what the cache finds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.cache.jobs import Job
from cache.messages import SamplingParams
from cache.prefix_cache import PrefixCache
from cache.types import RequestId
from loadtest.simulation.machine import Machine
from replica.output.detokenizer import Detokenizer, NoText
from replica.scheduling.request import Request
from replica.scheduling.runner import StepResult
from replica.scheduling.scheduler import Scheduler
from replica.scheduling.step_time import attention_pairs

_SAMPLING = SamplingParams(max_tokens=1)
# Nobody reads the text: one detokenizer that all requests share and none uses.
_NO_TEXT = Detokenizer(NoText(), _SAMPLING, frozenset(), max_tokens=1, sent_chars=0)

Progress = Callable[[int], None]
"""Told how many requests have ended."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of it."""

    prompt_tokens: int
    hit_tokens: int  # of those, found at a request's first admission
    computed_tokens: int  # of prompts and answers, again after a preemption included
    mean_ttft_s: float
    num_steps: int
    num_preemptions: int
    busy_s: float  # modelled


def replay(
    cache: PrefixCache,
    num_blocks: int,
    jobs: Sequence[Job],
    machine: Machine,
    progress: Progress,
    *,
    each_step: Callable[[], None],
) -> Replayed:
    """All jobs, in order of arrival, to their end. each_step: called after every one."""
    now_s = 0.0
    scheduler = Scheduler(
        cache,
        num_blocks=num_blocks,
        block_size=cache.block_size,
        max_model_len=machine.max_model_len,
        max_batched_tokens=machine.max_batched_tokens,
        max_running=machine.max_running,
        max_waiting=len(jobs),
        clock=lambda: now_s,
    )
    step_time, coming, jobs_of = machine.step_time(), deque(jobs), dict[RequestId, Job]()
    hit_tokens = computed = num_steps = num_ended = 0
    ttft_s = busy_s = 0.0
    while coming or len(scheduler):
        if not len(scheduler):
            now_s = max(now_s, coming[0].arrival_s)
        while coming and coming[0].arrival_s <= now_s:
            job = coming.popleft()
            request = _request(cache, job, len(jobs_of))
            jobs_of[request.request_id] = job
            scheduler.submit(request)
        planned = scheduler.plan()
        assert planned, "requests are left, but none can be scheduled"
        new_tokens = sum(num_tokens for _, num_tokens in planned)
        attention = sum(attention_pairs(request.num_computed, num_tokens) for request, num_tokens in planned)
        took_s = step_time.step_s(new_tokens, attention, len(planned))
        now_s, busy_s, computed, num_steps = (
            now_s + took_s,
            busy_s + took_s,
            computed + new_tokens,
            num_steps + 1,
        )
        tokens = tuple(
            jobs_of[request.request_id].answer[request.num_output_tokens]
            if num_tokens == request.num_uncomputed
            else None
            for request, num_tokens in planned
        )
        for request in scheduler.update(StepResult(tokens, took_s)):
            if request.num_output_tokens == 1:
                ttft_s += now_s - request.arrival_s
            if request.num_output_tokens == request.max_output_tokens:
                scheduler.finish(request)
                hit_tokens += request.cached_tokens or 0
                num_ended += 1
                progress(num_ended)
        each_step()
    return Replayed(
        prompt_tokens=sum(len(job.prompt) for job in jobs),
        hit_tokens=hit_tokens,
        computed_tokens=computed,
        mean_ttft_s=ttft_s / len(jobs),
        num_steps=num_steps,
        num_preemptions=scheduler.num_preemptions,
        busy_s=busy_s,
    )


def _request(cache: PrefixCache, job: Job, number: int) -> Request:
    token_ids = job.prompt[:]
    return Request(
        request_id=RequestId(str(number)),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        max_output_tokens=len(job.answer),
        sampling=_SAMPLING,
        seed=0,
        arrival_s=job.arrival_s,
        expires_s=None,
        blocks=cache.begin(token_ids),
        detokenizer=_NO_TEXT,
    )
