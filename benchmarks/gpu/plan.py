"""What `make bench-gpu` runs: networks, cases, contenders, targets. Pure values; knows no torch.

Targets are for an H200 and an 8B-shaped network (ratios, so that another card may be held to them too).
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cases import ModelSpec
from benchmarks.contender import CONTINUOUS, GENERATE

GATHER, TRITON, FLASH = "gather_sdpa", "triton", "flash_attn"
UNRECORDED = "triton_unrecorded"  # the same without CUDA graphs
BACKENDS = (GATHER, TRITON, UNRECORDED, FLASH)
NAMES = (TRITON, UNRECORDED, GATHER, FLASH, GENERATE, CONTINUOUS)
"""Our engine over each attention backend, then transformers' two ways; most wanted first."""

SERVED = TRITON  # what is to serve on cards, and so held to the targets; the others are shown beside it
JUDGED_HIT, DECODE_BATCH = 0.9, 64  # what the targets are judged at
PREFILL_OF_MATRIX_RATE = 0.45
DECODE_OF_BANDWIDTH = 0.60
HIT_OVER_MISS = 6.5  # of 8.11 that arithmetic allows at 16,384 tokens


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt with one output token."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Decode:
    """Prompts that decode together."""

    batch: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything one run measures."""

    spec: ModelSpec
    prefills: tuple[Prefill, ...]
    decodes: tuple[Decode, ...]
    first_token: int  # prompt length
    hit_ratios: tuple[float, ...]
    correct_tokens: int  # greedy tokens compared
    repeats: int
    pool_tokens: int  # room for K and V, ours and continuous batching's
    step_tokens: int  # computed together at most
    matrix: int  # rows and columns of the matrices multiplied for the card's rate
    copied_bytes: int  # for its bandwidth
    has_targets: bool


# Qwen3-8B's shape: 8.2 billion weights, 16 GB in half precision.
EIGHT_B = ModelSpec("8B", 4096, 12_288, 36, 32, 8, 128, 151_936, max_positions=32_768)
MICRO = ModelSpec("micro", 64, 128, 2, 4, 2, 16, 500, max_positions=512)

FULL = Plan(
    spec=EIGHT_B,
    prefills=(Prefill(2_048), Prefill(8_192), Prefill(16_384)),
    decodes=(Decode(1, 1_024, 40), Decode(8, 1_024, 40), Decode(64, 1_024, 40), Decode(8, 16_384, 24)),
    first_token=16_384,
    hit_ratios=(0.5, 0.9),
    correct_tokens=32,
    repeats=3,
    pool_tokens=160_000,
    step_tokens=8_192,
    matrix=8_192,
    copied_bytes=4 << 30,
    has_targets=True,
)
TINY = Plan(
    spec=MICRO,
    prefills=(Prefill(48),),
    decodes=(Decode(1, 20, 6), Decode(4, 20, 6)),
    first_token=200,
    hit_ratios=(0.5, 0.9),
    correct_tokens=4,
    repeats=1,
    pool_tokens=2_048,
    step_tokens=128,
    matrix=128,
    copied_bytes=1 << 20,
    has_targets=False,
)
