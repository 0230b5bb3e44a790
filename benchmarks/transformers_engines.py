"""transformers' own two ways to answer prompts as contenders: `generate`, and `generate_batch`'s engine."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from benchmarks.contender import Job, Run
from benchmarks.spans import Span, gaps, now

RESULT_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Considered:
    """Greedy tokens, and those that were nearly taken."""

    outputs: tuple[tuple[int, ...], ...]  # by prompt
    # By prompt and place: tokens, and how far below the largest their logits are, that one first.
    nearest: tuple[tuple[tuple[tuple[int, float], ...], ...], ...]


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
