"""Log probabilities of tokens, and of the most probable ones beside them.

Of the model's own distribution: its logits as they come, before bias, penalties, temperature and filters
(vLLM's `raw_logprobs`). Knows logits and tokens; knows neither requests nor text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import torch

from cache.messages import Logprobs

# A logit of minus infinity has no logarithm that JSON could spell; the API's own number for it.
LEAST = -9999.0

# Logits that are looked at at once: bounds the memory of scoring a long prompt (64 MiB a tensor).
MAX_ELEMENTS = 1 << 24


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: Sequence[int]) -> list[Logprobs]:
    """One token's per row. logits: (rows, vocabulary), any float type; not changed. tokens: (rows,) int64.

    num_top: how many of the most probable ones each row wants.
    """
    num_top = [min(count, logits.shape[1]) for count in num_top]
    chosen, top_ids, top = (each.tolist() for each in _rank(logits, tokens, max(num_top)))
    return [
        Logprobs(
            count, array("f", chosen[row]), array("i", top_ids[row][:count]), array("f", top[row][:count])
        )
        for row, count in enumerate(num_top)
    ]


def scored(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> Logprobs:
    """Of consecutive tokens: row i's logits are what the model said of token i. Shapes as above."""
    num_top = min(num_top, logits.shape[1])
    chosen, top_ids, top = (each.flatten().tolist() for each in _rank(logits, tokens, num_top))
    return Logprobs(num_top, array("f", chosen), array("i", top_ids), array("f", top))


def slices(num_rows: int, vocabulary: int) -> Iterator[slice]:
    """Rows to be scored, a bounded number of logits at a time."""
    size = max(1, MAX_ELEMENTS // vocabulary)
    return (slice(at, min(at + size, num_rows)) for at in range(0, num_rows, size))


def _rank(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows, 1), then ids and values of the largest, (rows, num_top)."""
    logits = logits.float()
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None]) - total
    largest = logits.topk(num_top, dim=-1)
    return chosen.clamp(LEAST, 0), largest.indices, (largest.values - total).clamp(LEAST, 0)
