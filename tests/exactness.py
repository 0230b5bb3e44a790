"""Our engine against transformers' `generate`: the prompts, the reference, and one run in each manner.

The same cases run on CPU (`integration/test_exactness.py`) and on CUDA (`gpu/test_exactness_gpu.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.block_hash import BlockHasher
from cache.fingerprint import Fingerprint, HashAlgorithm
from cache.messages import GenerateRequest, SamplingParams
from cache.types import RequestId, pack_tokens
from replica.config import ReplicaConfig
from replica.engine_core import Completion, EngineCore
from replica.model_runner import ModelRunner
from replica.model_source import load_model, resolve
from tests.fakes_models import VOCABULARY

NUM_NEW_TOKENS = 16
GREEDY = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Manner:
    """One way to run the same prompts: none of it may change an answer."""

    name: str
    block_size: int = 16
    num_blocks: int = 128
    max_batched_tokens: int = 256
    prefix_caching: bool = True
    num_late: int = 0  # of the prompts, how many arrive while the others run


MANNERS = [
    Manner("cached"),
    Manner("cache off", prefix_caching=False),
    Manner("chunked", max_batched_tokens=23, num_late=4),
    Manner("small pool", num_blocks=10, num_late=3),  # preempts
    Manner("blocks of 4", block_size=4, max_batched_tokens=61, num_late=4),
]


def prompts() -> list[list[int]]:
    """Shared prefixes, exact multiples of a block, a single token, twins: what caches get wrong."""
    shared, other = _tokens(48, 5), _tokens(33, 11)
    return [
        shared + _tokens(9, 1),
        shared + _tokens(20, 2),
        shared,  # three full blocks: one token must be computed again
        other + _tokens(15, 3),  # 48 in all
        other,
        _tokens(16, 4),
        _tokens(1, 6),
        shared + _tokens(9, 1),  # twin of the first, in the same step
        _tokens(70, 7),
        other + _tokens(2, 8),
    ]


def _tokens(count: int, seed: int) -> list[int]:
    return [3 + (seed * 7919 + index * (104729 + 2 * seed)) % (VOCABULARY - 3) for index in range(count)]


def reference(folder: Path, device: str = "cpu") -> list[list[int]]:
    """Greedy output of transformers' own `generate`, eager attention, float32, one prompt at a time."""
    import torch

    model = load_model(resolve(str(folder)), torch.device(device), torch.float32)
    model.set_attn_implementation("eager")
    outputs = []
    for prompt in prompts():
        ids = torch.tensor([prompt], device=device)
        done = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=NUM_NEW_TOKENS,
            max_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
            eos_token_id=VOCABULARY + 1,  # never drawn: every output has full length
            pad_token_id=2,
        )
        outputs.append(done[0, len(prompt) :].tolist())
    return outputs


def load_runner(folder: Path, manner: Manner, device: str = "cpu") -> ModelRunner:
    return ModelRunner.load(_config(manner, device), resolve(str(folder)))


def engine(runner: ModelRunner, manner: Manner, device: str = "cpu") -> EngineCore:
    fingerprint = Fingerprint(
        "test", "0", runner.info.kv_dtype, "", manner.block_size, HashAlgorithm.XXH3_128
    )
    return EngineCore(runner, _config(manner, device), BlockHasher(fingerprint))


def _config(manner: Manner, device: str) -> ReplicaConfig:
    return ReplicaConfig(
        device=device,
        dtype="float32",
        torch_threads=1,
        block_size=manner.block_size,
        num_blocks=manner.num_blocks,
        max_batched_tokens=manner.max_batched_tokens,
        prefix_caching=manner.prefix_caching,
    )


def run(
    core: EngineCore, manner: Manner, sampling: SamplingParams = GREEDY, label: str = "r"
) -> list[Completion]:
    """All prompts to their end: the last `num_late` of them are submitted three steps later."""
    requests = [
        GenerateRequest(
            request_id=RequestId(f"{label}{index}"),
            token_ids=pack_tokens(prompt),
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            seed=1000 + index,
        )
        for index, prompt in enumerate(prompts())
    ]
    early = requests[: len(requests) - manner.num_late]
    taken = [core.submit(request) for request in early]
    for _ in range(3):
        _step(core)
    taken += [core.submit(request) for request in requests[len(early) :]]
    while core.has_work:
        _step(core)
    return [_completed(request) for request in taken]


def _step(core: EngineCore) -> None:
    for progress in core.step():
        if progress.error is not None:
            raise progress.error


def _completed(request: Any) -> Completion:
    return Completion(
        request_id=request.request_id,
        token_ids=tuple(request.token_ids[request.num_prompt_tokens :]),
        text="",
        cached_tokens=request.cached_tokens or 0,
        finish_reason=request.finish_reason,
        num_preemptions=request.num_preemptions,
    )


def outputs(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]


def check_manner(folder: Path, manner: Manner, expected: list[list[int]], device: str = "cpu") -> None:
    """Cold, then warm over the same cache: the same tokens as the reference, and the cache's own facts."""
    runner = load_runner(folder, manner, device)
    core = engine(runner, manner, device)
    cold = run(core, manner, label="cold")
    assert outputs(cold) == expected, "cold"
    warm = run(core, manner, label="warm")
    assert outputs(warm) == expected, "warm"
    cached = [completion.cached_tokens for completion in warm]
    stats = core.stats()
    assert stats.cache.used == 0
    assert stats.cache.free == stats.cache.total
    if not manner.prefix_caching:
        assert cached == [0] * len(cached)
    elif manner.num_blocks > 64:  # nothing was evicted: all but the last token's block is there
        sizes = [len(prompt) for prompt in prompts()]
        assert cached == [(size - 1) // manner.block_size * manner.block_size for size in sizes]
    assert (stats.preemptions > 0) == (manner.name == "small pool")
    runner.close()
