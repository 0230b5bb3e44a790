"""How far an attention backend is from exact attention, on the layer's own shape and in its own type.

The reference is gather + SDPA in float32 over the same numbers, on the same device: what is left is rounding.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from benchmarks.cases import ModelSpec
from benchmarks.gpu.contenders import block_size
from cache.messages import SamplingParams
from cache.types import RequestId
from replica.attention.backend import AttentionCall, choose_backend
from replica.attention.gather_sdpa import GatherSdpa
from replica.attention.kv_pages import LayerPages, LayerShape
from replica.attention.step_batch import StepBatch
from replica.scheduling.runner import ScheduledSequence

# Relative, of the whole answer's norm. Half precision: the answer's own rounding and that of the weights.
MOST_ERROR = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

# Between two logits: tokens no further apart are a near-tie, and either may come first. bfloat16 keeps 8
# bits, so logits between 4 and 8, as a drawn network's largest are, lie 1/32 apart; what the same sums in
# another order become through 36 layers is taken as eight such steps. float16 has 3 bits more. Of 152,000
# tokens hardly another is so near: what attends wrongly is told from what rounds otherwise.
MOST_GAP = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.25}
NUM_NEAREST = 8  # tokens looked at; one that is not among them is told as further away than all of them

SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Piece:
    """One sequence's share of a step."""

    start: int
    num_new: int


def steps(longest: int) -> Mapping[str, tuple[Piece, ...]]:
    """By name. longest: tokens of the longest sequence; the pages hold twice as many."""
    half = longest // 2
    return {
        "long decode": (Piece(longest - 1, 1),),
        "decodes of many lengths": tuple(Piece(max(1, longest // (8 * n)), 1) for n in range(1, 9)),
        "chunk with context": (Piece(longest - longest // 32, longest // 32),),
        "prompt": (Piece(0, longest // 8),),
        "all at once": (Piece(half, 1), Piece(half // 2 + 3, longest // 32), Piece(0, longest // 16 + 1)),
    }


def error_of(
    name: str, spec: ModelSpec, pieces: tuple[Piece, ...], device: torch.device, dtype: torch.dtype
) -> float:
    """Relative error of one step's attention in one layer."""
    torch.manual_seed(0)
    size = block_size(name)
    counts = [-(-(each.start + each.num_new) // size) for each in pieces]
    blocks = torch.randperm(sum(counts)).tolist()
    sequences = []
    for index, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
        table, blocks = blocks[:count], blocks[count:]
        sequences.append(_scheduled(index, piece, table))
    shape = LayerShape(spec.kv_heads, spec.head_dim, spec.head_dim)
    rows = sum(each.num_new for each in pieces)
    query = torch.randn(spec.heads, rows, spec.head_dim, device=device).to(dtype)
    key, value = (torch.randn(spec.kv_heads, rows, spec.head_dim, device=device).to(dtype) for _ in range(2))
    pages = LayerPages(None, shape, sum(counts), size, dtype, device)  # type: ignore[arg-type]
    pages.keys.normal_()
    pages.values.normal_()
    backend = choose_backend(name, device, dtype, [shape], size)
    got = _attended(backend, pages, sequences, (query, key, value), size, device)
    exact = LayerPages(None, shape, sum(counts), size, torch.float32, device)  # type: ignore[arg-type]
    exact.keys.copy_(pages.keys)
    exact.values.copy_(pages.values)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32 would be as coarse as what is judged
    try:
        wanted = _attended(
            GatherSdpa(device), exact, sequences, (query.float(), key.float(), value.float()), size, device
        )
    finally:
        torch.set_float32_matmul_precision(before)
    backend.close()
    return float((got.float() - wanted).norm() / wanted.norm())


def _attended(
    backend: object,
    pages: LayerPages,
    sequences: list[ScheduledSequence],
    numbers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    size: int,
    device: torch.device,
) -> torch.Tensor:
    query, key, value = numbers
    batch = StepBatch(sequences, size, device, query.dtype)
    call = AttentionCall(
        query=query, key=key, value=value, scale=query.shape[2] ** -0.5, window=None, softcap=None, sinks=None
    )
    with torch.inference_mode():
        pages.write(batch, key.transpose(0, 1), value.transpose(0, 1))
        attended: torch.Tensor = backend.attend(pages, batch, call)  # type: ignore[attr-defined]
    return attended


def _scheduled(index: int, piece: Piece, table: list[int]) -> ScheduledSequence:
    stop = piece.start + piece.num_new
    return ScheduledSequence(
        request_id=RequestId(f"piece-{index}"),
        token_ids=array("i", bytes(4 * stop)),
        block_table=table,
        start=piece.start,
        num_new_tokens=piece.num_new,
        num_prompt_tokens=stop,
        sampling=SAMPLING,
        seed=0,
    )
