"""Our engine as a contender, with the time inside its runner told apart from everything around it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.contender import Job, Run
from benchmarks.spans import NO_TIME, Span, now
from cache.block_hash import BlockHasher
from cache.host_tier import BlockMoves
from cache.messages import GenerateRequest, SamplingParams
from cache.types import RequestId
from replica.config import ReplicaConfig
from replica.engine.engine_core import EngineCore
from replica.output.detokenizer import TokenDecoder
from replica.scheduling.request import Request
from replica.scheduling.runner import (
    CopyTime,
    LaunchedStep,
    LaunchingRunner,
    Runner,
    RunnerInfo,
    ScheduledSequence,
    StepResult,
)


class Warmpath:
    """Our engine without its thread, as `EngineCore` is."""

    def __init__(
        self, runner: Runner, config: ReplicaConfig, hasher: BlockHasher, decoder: TokenDecoder | None = None
    ) -> None:
        self._config, self._hasher, self._decoder = config, hasher, decoder
        self._runner = _TimedRunner(runner)
        self._runner.warm_up()
        self._core = self._new_core(prefix_caching=True)
        self._num_requests = 0

    def _new_core(self, *, prefix_caching: bool) -> EngineCore:
        config = replace(self._config, prefix_caching=prefix_caching)
        return EngineCore(self._runner, config, self._hasher, decoder=self._decoder)

    def run(self, job: Job) -> Run:
        if job.is_cold:
            self._core = self._new_core(prefix_caching=job.prefix_caching)
        core, batch = self._core, len(job.prompts)
        requests = [self._request(prompt, job.output_tokens) for prompt in job.prompts]
        steps: list[Span] = []
        every_step: list[Span] = []
        first_tokens = NO_TIME
        self._runner.inside = NO_TIME
        began = stamp = now()
        taken = [core.submit(request) for request in requests]
        num_first = 0
        while core.has_work:
            progress = core.step()
            before, stamp = stamp, now()
            every_step.append(stamp - before)
            for each in progress:
                if each.error is not None:
                    raise each.error
                num_first += each.request.num_output_tokens == 1
            if num_first == batch:
                if first_tokens is NO_TIME:
                    first_tokens = stamp - began
                elif len(progress) == batch:
                    steps.append(stamp - before)
        whole = stamp - began
        return Run(
            outputs=tuple(_output(request) for request in taken),
            whole=whole,
            first_tokens=first_tokens,
            steps=tuple(steps),
            every_step=tuple(every_step),
            cached_tokens=sum(request.cached_tokens or 0 for request in taken),
            host=whole - self._runner.inside,
        )

    def _request(self, prompt: array[int], output_tokens: int) -> GenerateRequest:
        self._num_requests += 1
        return GenerateRequest(
            request_id=RequestId(f"bench-{self._num_requests}"),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
            seed=0,
        )


class _TimedStep:
    """A step that was begun; the time it is waited for counts as inside the runner."""

    def __init__(self, runner: _TimedRunner, step: LaunchedStep) -> None:
        self._runner = runner
        self.step = step

    def result(self) -> StepResult:
        began = now()
        result = self.step.result()
        self._runner.inside += now() - began
        return result


class _TimedRunner:
    """A runner that adds up the time spent inside it, to tell the forward from everything around it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.inside = NO_TIME

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def execute(self, sequences: list[ScheduledSequence]) -> StepResult:
        began = now()
        result = self._runner.execute(sequences)
        self.inside += now() - began
        return result

    def launch(
        self, sequences: Sequence[ScheduledSequence], before: LaunchedStep | None = None
    ) -> LaunchedStep:
        assert isinstance(self._runner, LaunchingRunner)
        assert before is None or isinstance(before, _TimedStep)
        began = now()
        step = self._runner.launch(sequences, before.step if before is not None else None)
        self.inside += now() - began
        return _TimedStep(self, step)

    def copy_blocks(self, moves: BlockMoves) -> Sequence[CopyTime]:
        return self._runner.copy_blocks(moves)

    def warm_up(self) -> float:
        return self._runner.warm_up()

    def close(self) -> None:
        self._runner.close()


def _output(request: Request) -> tuple[int, ...]:
    return tuple(request.token_ids[request.num_prompt_tokens :])
