"""Decode attention of many sequences at once, as two products over contiguous keys and values.

One query row per head makes a poor tile for a flash kernel: it spends its time setting up, not reading.
Two products read K and V at nearly the speed of memory. Measured on one AVX-512 core (torch 2.13, float32,
K and V out of cache, 4 K/V heads of 64, 3 query heads each), microseconds a layer:

    sequences x keys    1 x 140   8 x 140   32 x 140   4 x 2,048
    SDPA                     35       344      1,372       1,709
    two products             38       240        790       1,160

- scores: a batched product over all the room that is kept. Only the room is contiguous from one sequence
  to the next; products of slices of it are slower than the few more columns.
- values: a weighted sum of rows, which is what an embedding bag is. Its kernel fetches rows ahead and, with
  so few query heads, takes half as long as a batched product.

Knows tensors; knows neither pages nor requests.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn.functional import embedding_bag

# Fewer elements of K than this: SDPA is one call where this is five.
FEWEST_ELEMENTS = 1 << 17

# In half precision the weights would be rounded before they weigh; flash kernels keep them in float32.
EXACT_DTYPES = (torch.float32, torch.float64)

# Shapes whose bags are kept: one per kind of layer in a step, and the step before's.
KEPT_BAGS = 4


class WideDecode:
    """Holds the row numbers that the layers of a step share. Engine thread only."""

    def __init__(self) -> None:
        self._bags = lru_cache(maxsize=KEPT_BAGS)(_bags)

    def suits(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether this is the faster way. keys, values: (size, kv_heads, room, dim)."""
        return (
            keys.numel() >= FEWEST_ELEMENTS
            and keys.dtype in EXACT_DTYPES
            and keys.device.type == "cpu"
            and keys.is_contiguous()
            and values.is_contiguous()
        )

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        length: int,
        bias: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """(size, kv_heads, group, value_dim) of query (size, kv_heads, group, key_dim).

        keys, values: (size, kv_heads, room, dim), of which the first `length` count and are finite; bias
        broadcasts against (size, kv_heads, group, length).
        """
        size, kv_heads, group, key_dim = query.shape
        room, value_dim = values.shape[2:]
        batch = size * kv_heads
        products = torch.bmm(
            (query * scale).reshape(batch, group, key_dim),
            keys.view(batch, room, key_dim).transpose(1, 2),
        )
        scores = products.view(size, kv_heads, group, room)[..., :length]
        if bias is not None:
            scores = scores + bias
        rows, bag_starts = self._bags(batch, group, room, length)
        attended = embedding_bag(
            rows,
            values.view(batch * room, value_dim),
            bag_starts,
            mode="sum",
            per_sample_weights=scores.softmax(-1).reshape(-1),
        )
        return attended.view(size, kv_heads, group, value_dim)


def _bags(batch: int, group: int, room: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each query head's rows among all K/V heads' `room` rows, and where each head's begin; int32."""
    first_rows = torch.arange(batch, dtype=torch.int32)[:, None, None] * room
    rows = (first_rows + torch.arange(length, dtype=torch.int32)).expand(batch, group, length)
    return rows.reshape(-1), torch.arange(0, batch * group * length, length, dtype=torch.int32)
