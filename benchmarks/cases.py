"""What `make bench-engine` runs: models, cases, how often. Pure values; knows no torch.

Plan
├── models          the networks, built from their config with seeded weights
├── throughput      batch sizes: prefill and decode tokens/s, peak memory
├── first_token     prompt lengths: time to first token by prefix hit
├── whole           batch, prompt, output: requests from submission to last token
└── overhead        prefix caching on beside off, with nothing shared
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

from cache.types import pack_tokens

# Ids below this are the tokenizer's special tokens; a prompt has none of them.
FIRST_PLAIN_TOKEN = 3


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A network of Qwen3's shape."""

    name: str
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    seed: int = 20260301
    max_positions: int = 8192

    @property
    def num_parameters(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads) + 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.mlp + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


@dataclass(frozen=True, slots=True)
class Throughput:
    """`batch` prompts at once: once with a single output token (prefill), once with many (decode)."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    repeats: int
    decode_repeats: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One prompt, computed in full and then twice more with a part of it in the cache."""

    prompt_tokens: int
    repeats: int
    hit_ratios: tuple[float, ...] = (0.5, 0.9)


@dataclass(frozen=True, slots=True)
class Whole:
    """Requests from submission to their last token."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Overhead:
    """Nothing shared: what keeping hashes costs. Many short pairs, because the effect is small."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything one run measures, the same for each model but for the number of repeats."""

    models: tuple[ModelSpec, ...]
    throughput: tuple[Throughput, ...] = ()
    first_token: tuple[FirstToken, ...] = ()
    whole: tuple[Whole, ...] = ()
    overhead: tuple[Overhead, ...] = ()
    num_blocks: int = 1024  # KV pool of both engines that have one; 16 tokens a block
    fewer_repeats: frozenset[str] = field(default_factory=frozenset)  # models run once where others run often

    def repeats(self, model: ModelSpec, wanted: int) -> int:
        return max(1, wanted // 2) if model.name in self.fewer_repeats else wanted


SMALL = ModelSpec("9M", 256, 768, 6, 8, 2, 32, 8_000)
LARGE = ModelSpec("132M", 768, 2304, 12, 12, 4, 64, 32_000)
MODELS = {spec.name: spec for spec in (SMALL, LARGE)}

BATCHES = (1, 8, 32)
SHAPES = ((257, 64), (1_024, 32), (2_048, 16))


def full_plan(models: tuple[ModelSpec, ...], repeats: int) -> Plan:
    """Everything. `repeats` for the small model; the large one, fifteen times as slow, runs half as often."""
    return Plan(
        models=models,
        # Continuous batching's step at batch 32 takes 270 to 430 ms from one run to the next: more of them.
        throughput=tuple(
            Throughput(batch, 128, 20, repeats, repeats + 2 * (batch == max(BATCHES))) for batch in BATCHES
        ),
        first_token=tuple(FirstToken(length, repeats) for length in (1_024, 4_096)),
        whole=tuple(
            Whole(batch, prompt, output, max(1, repeats // (2 * batch)))
            for batch in (1, 4)
            for prompt, output in SHAPES
        ),
        overhead=(Overhead(4, 128, 16, 3 * repeats),),
        fewer_repeats=frozenset({LARGE.name}),
    )


def quick_plan(models: tuple[ModelSpec, ...], repeats: int) -> Plan:
    """The same sections with less in them: a minute, to see that nothing fell over."""
    return Plan(
        models=models,
        throughput=tuple(Throughput(batch, 128, 20, repeats, repeats) for batch in BATCHES),
        first_token=(FirstToken(1_024, repeats), FirstToken(4_096, 1)),
        whole=(Whole(1, 257, 64, repeats), Whole(4, 257, 64, 1)),
        overhead=(Overhead(4, 128, 16, 3 * repeats),),
        fewer_repeats=frozenset({LARGE.name}),
    )


def random_prompt(rng: random.Random, length: int, vocabulary: int) -> array[int]:
    """Tokens in no order: two prompts share a block by an accident that does not happen."""
    return pack_tokens([rng.randrange(FIRST_PLAIN_TOKEN, vocabulary) for _ in range(length)])


def random_prompts(rng: random.Random, batch: int, length: int, vocabulary: int) -> tuple[array[int], ...]:
    return tuple(random_prompt(rng, length, vocabulary) for _ in range(batch))


def with_shared_prefix(rng: random.Random, prompt: array[int], ratio: float, vocabulary: int) -> array[int]:
    """A prompt as long as `prompt` whose first `ratio` is the same and whose next token differs."""
    shared = int(len(prompt) * ratio)
    tail = random_prompt(rng, len(prompt) - shared, vocabulary)
    if tail[0] == prompt[shared]:
        tail[0] = FIRST_PLAIN_TOKEN if tail[0] != FIRST_PLAIN_TOKEN else FIRST_PLAIN_TOKEN + 1
    return prompt[:shared] + tail
