"""What `make bench-engine` runs: models, cells, how often. Pure values; knows no torch.

Plan
├── models          the networks, built from their config with seeded weights
├── throughput      batch sizes: prefill and decode tokens/s, peak memory
├── first_token     prompt lengths: time to first token by prefix hit
├── whole           batch, prompt, output: requests from submission to last token
├── overhead        prefix caching on beside off, with nothing shared
└── pairs           how often each of them is run, ours and `generate` side by side
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Collection
from dataclasses import dataclass, replace

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
    """`batch` prompts at once: answered by a token each, for the prefill; by more, for steps that decode."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    references: int = 2  # of continuous batching, which varies more than a pair does

    @property
    def name(self) -> str:
        return f"batch-{self.batch}"

    @property
    def prefill(self) -> Throughput:
        """The same prompts with an answer of one token: nobody decodes beside the last of them."""
        return replace(self, output_tokens=1)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One prompt, computed in full and then twice more with a part of it in the cache."""

    prompt_tokens: int
    hit_ratios: tuple[float, ...] = (0.5, 0.9)

    @property
    def name(self) -> str:
        return f"first-{self.prompt_tokens}"


@dataclass(frozen=True, slots=True)
class Whole:
    """Requests from submission to their last token."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    references: int = 1

    @property
    def name(self) -> str:
        return f"whole-{self.batch}x{self.prompt_tokens}"


@dataclass(frozen=True, slots=True)
class Overhead:
    """Nothing shared: what keeping hashes costs. Many short pairs, because the effect is small."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    repeats: int  # a whole number of its own: what it compares is not `generate`

    @property
    def name(self) -> str:
        return "caching"


Cell = Throughput | FirstToken | Whole | Overhead

# What a step costs beside the tokens it computes, as prompt tokens: weights are read, and attention over what
# is there. With it a core computes some PACE parameter-tokens a second of either model, ours or `generate`'s,
# which is near enough for planning (AMD EPYC, float32).
STEP_TOKENS, TOKENS_PER_DECODE = 16.0, 1.5
PACE = 7e10


def work(model: ModelSpec, prompt_tokens: int, batch: int, output_tokens: int) -> float:
    """How much computing a job is, parameter-tokens. prompt_tokens: of all its prompts."""
    return model.num_parameters * (prompt_tokens + output_tokens * (STEP_TOKENS + TOKENS_PER_DECODE * batch))


@dataclass(frozen=True, slots=True)
class Pairs:
    """How many pairs a cell gets: as many as fit into its time, by the work it is planned to be.

    Not by what the first ones take: the same plan runs on a busy machine, and its total is known before.
    """

    seconds: float = 6.0
    fewest: int = 3  # an interval over two is six times as wide as it need be
    most: int = 12

    def of(self, pair_work: float) -> int:
        """pair_work: of the cell's job, both contenders', in parameter-tokens."""
        return min(self.most, max(self.fewest, int(self.seconds * PACE / pair_work)))


def exactly(count: int) -> Pairs:
    """So many for every cell."""
    return Pairs(fewest=count, most=count)


class UnknownCells(ValueError):
    """Asked for by a name that none has."""

    def __init__(self, unknown: Collection[str], known: Collection[str]) -> None:
        super().__init__(f"no cell is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything one run measures, the same for each model but for the number of pairs."""

    models: tuple[ModelSpec, ...]
    throughput: tuple[Throughput, ...] = ()
    first_token: tuple[FirstToken, ...] = ()
    whole: tuple[Whole, ...] = ()
    overhead: tuple[Overhead, ...] = ()
    pairs: Pairs = Pairs()
    num_blocks: int = 1024  # KV pool of both engines that have one; 16 tokens a block

    @property
    def cells(self) -> tuple[Cell, ...]:
        """In the order they are measured."""
        return (*self.throughput, *self.first_token, *self.whole, *self.overhead)

    def only(self, names: Collection[str]) -> Plan:
        """Nothing but the cells of these names. Raises UnknownCells."""
        known = [cell.name for cell in self.cells]
        if unknown := set(names).difference(known):
            raise UnknownCells(unknown, known)
        return replace(
            self,
            throughput=tuple(cell for cell in self.throughput if cell.name in names),
            first_token=tuple(cell for cell in self.first_token if cell.name in names),
            whole=tuple(cell for cell in self.whole if cell.name in names),
            overhead=tuple(cell for cell in self.overhead if cell.name in names),
        )

    def num_pairs(self, model: ModelSpec, cell: Cell) -> int:
        """How often ours and the other run side by side."""
        match cell:
            case Overhead():  # the large model, fifteen times as slow, half as often
                return max(1, cell.repeats // (2 if model.name == LARGE.name else 1))
            case FirstToken():
                return self.pairs.of(2 * work(model, cell.prompt_tokens, 1, 1))
            case _:
                tokens = cell.batch * cell.prompt_tokens
                return self.pairs.of(2 * work(model, tokens, cell.batch, cell.output_tokens))

    def num_references(self, model: ModelSpec, cell: Throughput | Whole) -> int:
        """Of these pairs, how many continuous batching runs beside."""
        return min(cell.references, self.num_pairs(model, cell))


SMALL = ModelSpec("9M", 256, 768, 6, 8, 2, 32, 8_000)
LARGE = ModelSpec("132M", 768, 2304, 12, 12, 4, 64, 32_000)
MODELS = {spec.name: spec for spec in (SMALL, LARGE)}

BATCHES = (1, 8, 32)
SHAPES = ((257, 64), (1_024, 32), (2_048, 16))


def full_plan(models: tuple[ModelSpec, ...], pairs: Pairs) -> Plan:
    """Everything."""
    return Plan(
        models=models,
        throughput=tuple(Throughput(batch, 128, 20) for batch in BATCHES),
        first_token=tuple(FirstToken(length) for length in (1_024, 4_096)),
        whole=tuple(Whole(batch, prompt, output) for batch in (1, 4) for prompt, output in SHAPES),
        overhead=(Overhead(4, 128, 16, 12),),
        pairs=pairs,
    )


def quick_plan(models: tuple[ModelSpec, ...], pairs: Pairs) -> Plan:
    """The same sections with less in them: a minute, to see that nothing fell over."""
    return Plan(
        models=models,
        throughput=tuple(Throughput(batch, 128, 20, references=1) for batch in BATCHES),
        first_token=(FirstToken(1_024), FirstToken(4_096)),
        whole=(Whole(1, 257, 64), Whole(4, 257, 64)),
        overhead=(Overhead(4, 128, 16, 6),),
        pairs=pairs,
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
