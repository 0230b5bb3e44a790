"""What it would cost an engine to share to the token: the same keys and values, gathered from pages of one.

Batches of decodes are put together as for a forward (`StepBatch`), and one layer's keys and values are
gathered as its attention does in a batch's first steps. Knows tensors; knows no cache.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from cache.messages import SamplingParams
from cache.types import RequestId
from replica.attention.step_batch import StepBatch
from replica.scheduling.runner import ScheduledSequence

KV_HEADS, DIM = 4, 64  # of the 132M model that `make bench-engine` measures


@dataclass(frozen=True, slots=True)
class Paged:
    """Medians of CPU milliseconds at one page size."""

    page_tokens: int
    metadata_ms: float  # once a step
    gather_ms: float  # once a layer


def measure(page_tokens: int, *, num_sequences: int, context: int, rounds: int) -> Paged:
    """Decodes of `context` tokens each, whose pages lie scattered as they do in a pool that is in use."""
    pages_each = -(-context // page_tokens)
    page_ids = random.Random(0).sample(range(num_sequences * pages_each), num_sequences * pages_each)
    tokens = array("i", bytes(4 * context))
    sequences = [
        ScheduledSequence(
            request_id=RequestId(str(number)),
            token_ids=tokens,
            block_table=page_ids[number * pages_each : (number + 1) * pages_each],
            start=context - 1,
            num_new_tokens=1,
            num_prompt_tokens=context,
            sampling=SamplingParams(max_tokens=1),
            seed=0,
        )
        for number in range(num_sequences)
    ]
    shape = (len(page_ids), page_tokens, KV_HEADS, DIM)
    keys, values = torch.ones(shape), torch.ones(shape)
    device, dtype = torch.device("cpu"), torch.float32

    def put_together() -> torch.Tensor:
        [group] = StepBatch(sequences, page_tokens, device, dtype).decode_groups(None)
        return group.block_ids

    block_ids = put_together()
    out = torch.empty_like(keys), torch.empty_like(values)

    def gather() -> None:
        torch.index_select(keys, 0, block_ids, out=out[0])
        torch.index_select(values, 0, block_ids, out=out[1])

    return Paged(page_tokens, _median_ms(put_together, rounds), _median_ms(gather, rounds))


def _median_ms(call: Callable[[], object], rounds: int) -> float:
    spent = []
    for _ in range(rounds):
        began_s = time.process_time()
        call()
        spent.append(time.process_time() - began_s)
    return 1000 * median(spent)
