"""Steps made by hand for the tests of metadata, pages and attention: sequences without an engine."""

from __future__ import annotations

from array import array

import torch

from cache.messages import SamplingParams
from cache.types import RequestId
from replica.attention.kv_pages import LayerPages, LayerShape
from replica.attention.step_batch import StepBatch
from replica.scheduling.runner import ScheduledSequence

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def scheduled(
    name: str, block_table: list[int], start: int, num_new_tokens: int, num_tokens: int | None = None
) -> ScheduledSequence:
    """Tokens [start, start + num_new_tokens) of a sequence whose token at position p is 100 + p."""
    stop = start + num_new_tokens
    return ScheduledSequence(
        request_id=RequestId(name),
        token_ids=array("i", range(100, 100 + (num_tokens or stop))),
        block_table=block_table,
        start=start,
        num_new_tokens=num_new_tokens,
        num_prompt_tokens=stop,
        sampling=SamplingParams(max_tokens=8, temperature=0.0),
        seed=0,
    )


def step(*sequences: ScheduledSequence) -> StepBatch:
    return StepBatch(list(sequences), BLOCK_SIZE, CPU, torch.float32)


def layer_pages(num_blocks: int = 16, kv_heads: int = 2, dim: int = 8) -> LayerPages:
    """One layer's pages full of NaN: whatever was not written must not be read."""
    shape = LayerShape(kv_heads, dim, dim)
    pages = LayerPages(None, shape, num_blocks, BLOCK_SIZE, torch.float32, CPU)  # type: ignore[arg-type]
    pages.keys.fill_(torch.nan)
    pages.values.fill_(torch.nan)
    return pages
