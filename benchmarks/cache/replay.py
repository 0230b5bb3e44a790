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
    engine = _Engine(cache, num_blocks, jobs, machine, progress)
    while engine.has_work:
        engine.take_arrived()
        engine.step()
        each_step()
    return engine.replayed()


class _Engine:
    """The scheduler, the jobs on their way to it, and the time that its steps have taken."""

    def __init__(
        self,
        cache: PrefixCache,
        num_blocks: int,
        jobs: Sequence[Job],
        machine: Machine,
        progress: Progress,
    ) -> None:
        self._cache, self._jobs, self._progress = cache, jobs, progress
        self._step_time = machine.step_time()
        self._scheduler = Scheduler(
            cache,
            num_blocks=num_blocks,
            block_size=cache.block_size,
            max_model_len=machine.max_model_len,
            max_batched_tokens=machine.max_batched_tokens,
            max_running=machine.max_running,
            max_waiting=len(jobs),
            clock=lambda: self._now_s,
        )
        self._coming = deque(jobs)
        self._job_by_id: dict[RequestId, Job] = {}
        self._now_s = self._busy_s = self._ttft_s = 0.0  # the last: of all requests together
        self._hit_tokens = self._computed_tokens = self._num_steps = self._num_ended = 0

    @property
    def has_work(self) -> bool:
        return bool(self._coming or len(self._scheduler))

    def take_arrived(self) -> None:
        """Submit the jobs that have come by now. With nothing else to do, now is when the next one comes."""
        if not len(self._scheduler):
            self._now_s = max(self._now_s, self._coming[0].arrival_s)
        while self._coming and self._coming[0].arrival_s <= self._now_s:
            job = self._coming.popleft()
            request = _request(self._cache, job, len(self._job_by_id))
            self._job_by_id[request.request_id] = job
            self._scheduler.submit(request)

    def step(self) -> None:
        """Plan, compute and end what has its answer."""
        planned = self._scheduler.plan()
        assert planned, "requests are left, but none can be scheduled"
        took_s = self._take_time(planned)
        tokens = tuple(
            self._next_token(request) if num_tokens == request.num_uncomputed else None
            for request, num_tokens in planned
        )
        for request in self._scheduler.update(StepResult(tokens, took_s)):
            if request.num_output_tokens == 1:
                self._ttft_s += self._now_s - request.arrival_s
            if request.num_output_tokens == request.max_output_tokens:
                self._end(request)

    def replayed(self) -> Replayed:
        return Replayed(
            prompt_tokens=sum(len(job.prompt) for job in self._jobs),
            hit_tokens=self._hit_tokens,
            computed_tokens=self._computed_tokens,
            mean_ttft_s=self._ttft_s / len(self._jobs),
            num_steps=self._num_steps,
            num_preemptions=self._scheduler.num_preemptions,
            busy_s=self._busy_s,
        )

    def _take_time(self, planned: Sequence[tuple[Request, int]]) -> float:
        """Let the time pass that the machine's model gives this step, in seconds."""
        new_tokens = sum(num_tokens for _, num_tokens in planned)
        attention = sum(attention_pairs(request.num_computed, num_tokens) for request, num_tokens in planned)
        took_s = self._step_time.step_s(new_tokens, attention, len(planned))
        self._now_s += took_s
        self._busy_s += took_s
        self._computed_tokens += new_tokens
        self._num_steps += 1
        return took_s

    def _next_token(self, request: Request) -> int:
        return self._job_by_id[request.request_id].answer[request.num_output_tokens]

    def _end(self, request: Request) -> None:
        self._scheduler.finish(request)
        self._hit_tokens += request.cached_tokens or 0
        self._num_ended += 1
        self._progress(self._num_ended)


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
