"""What the engine's tests share: a clock that only moves when told, requests in one line, small engines."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from tokenizers import Tokenizer

from cache.block_hash import BlockHasher
from cache.events import StepTimeModel
from cache.fingerprint import Fingerprint, HashAlgorithm
from cache.host_tier import TierEventSink
from cache.messages import GenerateRequest, PinLease, SamplingParams
from cache.types import PinId, RequestId
from replica.config import ReplicaConfig, SimConfig
from replica.engine.engine_core import EngineCore
from replica.output.detokenizer import TokenDecoder
from replica.runners.sim_runner import SimRunner
from replica.runners.virtual_clock import VirtualClock as VirtualClock
from replica.scheduling.step_time import StepTimeFit

BLOCK_SIZE = 4
# By it every step of decodes is over the least `itl_target_s` there is, 0.001 s, and prompts get the least.
LEAST_OVER = StepTimeModel(base_s=0.0012, per_token_s=1e-5, per_attention_s=0.0, per_sequence_s=0.0)
TINY_TOKENIZER = Path(__file__).parents[2] / "replica" / "models" / "tiny" / "tokenizer.json"


class TokenizersDecoder:
    """A real byte-level tokenizer, without transformers."""

    def __init__(self, path: Path = TINY_TOKENIZER) -> None:
        self.tokenizer = Tokenizer.from_file(str(path))

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids


@contextmanager
def known_pace(model: StepTimeModel = LEAST_OVER) -> Iterator[None]:
    """Engines that are made meanwhile know from their first step on what steps take, and never learn it."""
    with mock.patch.object(StepTimeFit, "model", return_value=model):
        yield


def fingerprint(block_size: int = BLOCK_SIZE) -> Fingerprint:
    return Fingerprint("model", "revision", "simulated", "", block_size, HashAlgorithm.XXH3_128)


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 4,
    output: Sequence[int] = (),
    seed: int = 0,
    sent_chars: int = 0,
    deadline_s: float | None = None,
    salt: str = "",
    temperature: float = 0.0,
    **sampling: Any,
) -> GenerateRequest:
    """output: tokens of an earlier attempt."""
    return GenerateRequest(
        request_id=RequestId(request_id),
        token_ids=array("i", [*prompt, *output]),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature, **sampling),
        seed=seed,
        sent_chars=sent_chars,
        deadline_s=deadline_s,
        cache_salt=salt,
    )


def sim_config(num_blocks: int = 64, *, sim: SimConfig | None = None, **settings: Any) -> ReplicaConfig:
    sim = replace(sim or SimConfig(), num_blocks=num_blocks)
    return ReplicaConfig(**{"runner": "simulated", "sim": sim, "block_size": BLOCK_SIZE, **settings})


def sim_core(
    num_blocks: int = 64,
    *,
    clock: VirtualClock | None = None,
    decoder: TokenDecoder | None = None,
    spelling_decoder: TokenDecoder | None = None,
    sink: TierEventSink | None = None,
    runner: SimRunner | None = None,
    sim: SimConfig | None = None,
    eos_token_ids: frozenset[int] = frozenset(),
    **settings: Any,
) -> EngineCore:
    """An engine core over the simulated runner, in virtual time."""
    clock = clock or VirtualClock()
    config = sim_config(num_blocks, sim=sim, **settings)
    runner = runner or SimRunner(
        config.sim,
        block_size=config.block_size,
        sleep=clock.sleep,
        eos_token_ids=eos_token_ids,
        host_cache_gib=config.host_cache_gib,
    )
    hasher = BlockHasher(fingerprint(config.block_size))
    return EngineCore(
        runner,
        config,
        hasher,
        decoder=decoder,
        spelling_decoder=spelling_decoder,
        sink=sink,
        clock=clock,
    )


def make_pin(
    name: str,
    prompt: Sequence[int],
    *,
    seconds: float = 60.0,
    salt: str = "",
    deadline_s: float | None = None,
) -> GenerateRequest:
    """A request to hold a prompt's full blocks; pin and request have the same name."""
    lease = PinLease(
        PinId(name),
        "somebody",
        seconds,
        copies=1,
        created_at=0.0,
        expires_at=seconds,
        keeper="router0",
        cache_salt=salt,
    )
    request = make_request(name, prompt, max_tokens=1, salt=salt, deadline_s=deadline_s)
    return replace(request, pin=lease)


def pinned(core: EngineCore, num_blocks: int) -> EngineCore:
    """The engine, of blocks of `BLOCK_SIZE`, holding so many of them in prefixes of ten or fewer."""
    for first in range(0, num_blocks, 10):
        count = min(10, num_blocks - first)
        core.submit(make_pin(f"held{first}", [first] * (count * BLOCK_SIZE)))
    run(core)
    assert core.stats().cache.pinned == num_blocks
    return core


def run(core: EngineCore, limit: int = 500) -> None:
    """Step by step until nobody is left."""
    while core.has_work:
        core.step()
        limit -= 1
        assert limit, "no progress"


def expect_short_answers(core: EngineCore) -> None:
    """So that longer ones, of which nobody knew, throw each other out."""
    core.complete([make_request(f"short{i}", [90 + i], max_tokens=4) for i in range(4)])
