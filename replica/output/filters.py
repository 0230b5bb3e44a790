"""Which tokens may be drawn at all: min-p, top-k and top-p.

Each keeps a *set*, the tokens at or above a row's threshold, ties at it included: a threshold moves by last
bits only where a score does. In this order, each over what the one before has left: min-p, top-k, top-p
(vLLM's). Knows scores and limits; knows neither requests nor draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cache.messages import SamplingParams
from replica.transfer import to_device

# top-p on a CPU looks at this many of the largest logits first; only flat distributions need the full sort.
NUCLEUS_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class Filters:
    """Some rows' limits, (rows, 1) each; None where no row has one."""

    least_share: torch.Tensor | None  # float32: log(min_p), minus infinity without one
    top_k: torch.Tensor | None  # int64; 0 = all
    widest_k: int  # the largest of `top_k`
    top_p: torch.Tensor | None  # float32; 1 = all

    @classmethod
    def of(cls, sampling: Sequence[SamplingParams], vocabulary: int, device: torch.device) -> Filters:
        least = [math.log(each.min_p) if each.min_p > 0 else -math.inf for each in sampling]
        top_k = [each.top_k if each.top_k < vocabulary else 0 for each in sampling]
        top_p = [each.top_p for each in sampling]

        def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return to_device(torch.tensor(values, dtype=dtype).numpy(), device)[:, None]

        return cls(
            least_share=column(least, torch.float32) if max(least) > -math.inf else None,
            top_k=column(top_k, torch.int64) if any(top_k) else None,
            widest_k=max(top_k),
            top_p=column(top_p, torch.float32) if min(top_p) < 1.0 else None,
        )

    def rows(self, part: slice) -> Filters:
        """Those of some of the rows."""
        cut = [None if each is None else each[part] for each in (self.least_share, self.top_k, self.top_p)]
        return Filters(cut[0], cut[1], self.widest_k, cut[2])

    def apply(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores, (rows, vocabulary) float32, with minus infinity where a token may not be drawn."""
        if self.least_share is not None:
            scores = keep_min_p(scores, self.least_share)
        if self.top_k is not None:
            scores = keep_top_k(scores, self.top_k, self.widest_k)
        if self.top_p is not None:
            scores = keep_top_p(scores, self.top_p)
        return scores


def keep_min_p(scores: torch.Tensor, least_share: torch.Tensor) -> torch.Tensor:
    """Keep tokens at least `exp(least_share)` times as probable as the most probable one."""
    return scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) + least_share, float("-inf"))


def keep_top_k(scores: torch.Tensor, top_k: torch.Tensor, widest: int) -> torch.Tensor:
    """Keep each row's `top_k` largest (0 = all). widest: the largest of them, below the vocabulary."""
    largest = scores.topk(widest, dim=-1).values
    thresholds = largest.gather(1, (top_k - 1).clamp(min=0))
    return scores.masked_fill((scores < thresholds) & (top_k > 0), float("-inf"))


def keep_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep each row's smallest set of most probable tokens whose probabilities reach `top_p`.

    Reads nothing back from a card: a step may be begun while the draw of the one before is computed.
    """
    total = scores.logsumexp(dim=-1, keepdim=True)
    # Whether fewer than all will do is only known by looking, for which a program would wait for its card.
    is_sorted_whole = scores.device.type != "cpu" or scores.shape[1] <= NUCLEUS_CANDIDATES
    largest = _largest_first(scores, scores.shape[1] if is_sorted_whole else NUCLEUS_CANDIDATES)
    mass = (largest - total).exp().cumsum(dim=-1)
    if not is_sorted_whole and bool(((mass[:, -1:] < top_p) & (top_p < 1.0)).any()):
        largest = _largest_first(scores, scores.shape[1])
        mass = (largest - total).exp().cumsum(dim=-1)
    # The last token kept is the first at which the mass reaches the wanted one.
    last = (mass < top_p).sum(dim=-1, keepdim=True).clamp(max=mass.shape[1] - 1)
    thresholds = largest.gather(1, last)
    return scores.masked_fill((scores < thresholds) & (top_p < 1.0), float("-inf"))


def _largest_first(scores: torch.Tensor, count: int) -> torch.Tensor:
    if count == scores.shape[1]:
        return scores.sort(dim=-1, descending=True).values
    return scores.topk(count, dim=-1).values
