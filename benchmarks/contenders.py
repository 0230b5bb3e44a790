"""Three ways to answer the same prompts, timed alike: our engine, `generate`, and `generate_batch`'s engine.

Each lives in a process of its own (`worker.py`) with its own copy of the model. All are greedy, fp32, one
token budget; the times exclude loading, warming up and allocating a pool.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.spans import NO_TIME, Span, gaps, now
from cache.block_hash import BlockHasher
from cache.host_tier import BlockMoves
from cache.messages import GenerateRequest, SamplingParams
from cache.types import RequestId
from replica.assembly import Assembly, assemble
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

OURS, GENERATE, CONTINUOUS = "warmpath", "generate", "continuous"
NAMES = (OURS, GENERATE, CONTINUOUS)
RESULT_TIMEOUT_S = 300.0
OUR_BLOCK_SIZE = ReplicaConfig().block_size


@dataclass(frozen=True, slots=True)
class Setup:
    """What every contender is given."""

    folder: Path  # the model's
    threads: int
    num_blocks: int
    max_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts that arrive together; all get exactly `output_tokens`."""

    prompts: tuple[array[int], ...]
    output_tokens: int
    prefix_caching: bool = True  # ours only
    is_cold: bool = True  # ours only: start with an empty cache


@dataclass(frozen=True, slots=True)
class Run:
    """One job, timed."""

    outputs: tuple[tuple[int, ...], ...]
    whole: Span  # submission to the last token
    first_tokens: Span  # submission until every sequence has its first token
    steps: tuple[Span, ...]  # steps in which every sequence decoded: the steady state
    every_step: tuple[Span, ...] = ()  # ours only: all of them, the first with the submission
    cached_tokens: int = 0  # of all prompts
    host: Span = NO_TIME  # ours only: the part of `whole` outside the runner
    peak_bytes: int = 0  # set by the worker: most memory held, above the loaded model


@dataclass(frozen=True, slots=True)
class Considered:
    """Greedy tokens, and those that were nearly taken."""

    outputs: tuple[tuple[int, ...], ...]  # by prompt
    # By prompt and place: tokens, and how far below the largest their logits are, that one first.
    nearest: tuple[tuple[tuple[tuple[int, float], ...], ...], ...]


class Contender(Protocol):
    """Loads when built; `run` may be called any number of times."""

    def run(self, job: Job) -> Run: ...


def load(name: str, setup: Setup) -> Contender:
    if name == OURS:
        return _warmpath(setup)
    if name == GENERATE:
        return Generate(_load_model(setup))
    assert name == CONTINUOUS
    return ContinuousBatching(
        _load_model(setup), num_tokens=setup.num_blocks * OUR_BLOCK_SIZE, step_tokens=setup.max_batched_tokens
    )


def _warmpath(setup: Setup) -> Warmpath:
    config = ReplicaConfig(
        model=str(setup.folder),
        device="cpu",
        dtype="float32",
        torch_threads=setup.threads,
        num_blocks=setup.num_blocks,
        max_batched_tokens=setup.max_batched_tokens,
    )
    assembly: Assembly = assemble(config)
    return Warmpath(assembly.runner, config, BlockHasher(assembly.fingerprint), assembly.decoder)


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


class Generate:
    """`model.generate` over one padded batch (of equal lengths here, so nothing is padded)."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.run(Job((array("i", range(3, 35)),), 2))

    def run(self, job: Job) -> Run:
        import torch

        inputs = torch.tensor([list(prompt) for prompt in job.prompts], device=self._model.device)
        settle(self._model.device)
        began = now()
        stamps: list[Span] = []

        def stamp(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            # Called once per token, after it was picked: the public place to look at the clock.
            settle(input_ids.device)
            stamps.append(now())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

        with torch.inference_mode():
            sequences = self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=_greedy(job.output_tokens),
                stopping_criteria=_criteria(stamp),
            )
        whole = now() - began
        outputs = sequences[:, inputs.shape[1] :].tolist()
        return Run(
            outputs=tuple(tuple(output) for output in outputs),
            whole=whole,
            first_tokens=stamps[0] - began,
            steps=gaps(stamps),
        )

    def considered(self, job: Job, count: int) -> Considered:
        """What it says, and what it nearly said: the tokens with the `count` largest logits at each place."""
        import torch

        inputs = torch.tensor([list(prompt) for prompt in job.prompts], device=self._model.device)
        with torch.inference_mode():
            said = self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=_greedy(
                    job.output_tokens, return_dict_in_generate=True, output_logits=True
                ),
            )
        largest = torch.stack(said.logits, dim=1).float().topk(count, dim=-1)  # (prompts, places, count)
        below = largest.values[..., :1] - largest.values
        return Considered(
            outputs=tuple(map(tuple, said.sequences[:, inputs.shape[1] :].tolist())),
            nearest=tuple(
                tuple(tuple(zip(*place, strict=True)) for place in zip(*prompt, strict=True))
                for prompt in zip(largest.indices.tolist(), below.tolist(), strict=True)
            ),
        )


class ContinuousBatching:
    """transformers' continuous batching over SDPA, given our engine's sizes: left to itself it takes most of
    RAM."""

    def __init__(self, model: Any, *, num_tokens: int, step_tokens: int) -> None:
        """num_tokens: what its pool holds. step_tokens: at most so many are computed together."""
        from transformers import ContinuousBatchingConfig

        self._model = model
        names = {field.name for field in fields(ContinuousBatchingConfig)}
        if "auto_switch_to_flash" not in names:
            # Unless it is named so, flash-attn or a kernel fetched from the hub takes the place of SDPA.
            model.set_attn_implementation("paged|sdpa")
        options = batching_options(names, num_tokens=num_tokens, step_tokens=step_tokens)
        self._new_config: Callable[[], Any] = partial(ContinuousBatchingConfig, **options)
        self.run(Job((array("i", range(3, 35)),), 2))

    def run(self, job: Job) -> Run:
        manager = self._model.init_continuous_batching(
            generation_config=_greedy(job.output_tokens),
            continuous_batching_config=self._new_config(),
        )
        forwards: list[tuple[Span, int]] = []  # when each began, and with how many tokens
        hook = self._model.register_forward_pre_hook(
            lambda _module, _args, kwargs: forwards.append(_noted(kwargs["input_ids"])), with_kwargs=True
        )
        try:
            # All are queued before its thread starts, so that it sees them together as we do; and its
            # time begins with its first forward, when its pool is there.
            names = manager.add_requests([list(prompt) for prompt in job.prompts], job.output_tokens)
            manager.start()
            outputs = self._collect(manager, len(names))
            ended = now()
        finally:
            manager.stop(block=True)
            hook.remove()
        began = forwards[0][0]
        stamps = [stamp for stamp, _ in forwards] + [ended]
        steady = longest_run([tokens for _, tokens in forwards], len(job.prompts))
        return Run(
            outputs=tuple(outputs[name] for name in names),
            whole=ended - began,
            # With one output token (a prefill job) this is the end; else its first decode of everybody.
            first_tokens=(ended if job.output_tokens == 1 else stamps[steady.start]) - began,
            steps=gaps(stamps[steady.start : steady.stop + 1]),
        )

    def _collect(self, manager: Any, count: int) -> dict[str, tuple[int, ...]]:
        outputs: dict[str, tuple[int, ...]] = {}
        give_up_s = time.monotonic() + RESULT_TIMEOUT_S
        while len(outputs) < count:
            result = manager.get_result(timeout=1.0)
            if result is None:
                if not manager.is_running() or time.monotonic() > give_up_s:
                    raise RuntimeError("transformers' continuous batching stopped without an answer")
            elif result.error is not None:
                raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
            elif result.is_finished():
                outputs[result.request_id] = tuple(result.generated_tokens)
        return outputs


# Continuous batching's own default, tokens: as fast as 16 in prefill, 10 % faster in decode (9M, batch 32).
BATCHING_PAGE_TOKENS = 256


def batching_options(names: Collection[str], *, num_tokens: int, step_tokens: int) -> dict[str, Any]:
    """What `ContinuousBatchingConfig` is given, as this transformers calls it. names: its fields.

    A pool of `num_tokens`, at most `step_tokens` computed together, SDPA, and no CUDA graphs: it records none
    over SDPA anyhow, and a replayed forward would pass by the hook that reads the clock.
    """
    options: dict[str, Any] = {
        "page_size" if "page_size" in names else "block_size": BATCHING_PAGE_TOKENS,
        "num_blocks": -(-num_tokens // BATCHING_PAGE_TOKENS),
        "max_batch_tokens": step_tokens,
        "use_cuda_graph": False,
    }
    if "auto_switch_to_flash" in names:
        options["auto_switch_to_flash"] = False
    return options


def settle(device: Any) -> None:
    """Wait until a card has done what it was given: a clock that is read before measures the giving."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _noted(input_ids: Any) -> tuple[Span, int]:
    settle(input_ids.device)
    return now(), input_ids.numel()


def longest_run(values: list[int], wanted: int) -> slice:
    """Where the longest unbroken run of `wanted` is; empty, at 0, when there is none.

    Of the steps that compute one token per sequence those in which all of them decode: a chunk of
    prompt may happen to have as many tokens, but not several times in a row.
    """
    best, first = slice(0, 0), 0
    for index, value in enumerate([*values, None]):
        if value != wanted:
            if index - first > best.stop - best.start:
                best = slice(first, index)
            first = index + 1
    return best


def _output(request: Request) -> tuple[int, ...]:
    return tuple(request.token_ids[request.num_prompt_tokens :])


def _load_model(setup: Setup) -> Any:
    """The same weights as ours, through transformers' ordinary loader."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(setup.threads)
    return AutoModelForCausalLM.from_pretrained(setup.folder, dtype=torch.float32).eval()


def _greedy(output_tokens: int, **more: Any) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=output_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
        **more,
    )


def _criteria(function: Callable[..., Any]) -> Any:
    from transformers import StoppingCriteriaList

    return StoppingCriteriaList([function])
