"""Decode attention of many sequences at once, as two sums of rows over kept keys and values.

One query row per head makes a poor tile for a flash kernel, and a poor product: both spend their time setting
up, not reading. A weighted sum of rows is what an embedding bag is, whose kernel fetches rows ahead and keeps
the sum in registers. Measured on one AVX-512 core (torch 2.13, float32, K and V out of cache, the row of
the newest token added to both), microseconds a layer, by a script that is not in the project:

    sequences x keys             8 x 140   8 x 256   8 x 704   32 x 140   32 x 256
    2 K/V heads of 32, 4 query heads each
      SDPA                            89       132       317        447        515
      product, then sum of rows      109       167       395        491        557
      two sums of rows                67        92       240        256        323
    4 K/V heads of 64, 3 query heads each
      SDPA                           433       466     1,182      1,154      1,794
      product, then sum of rows      365       374       907        732      1,272
      two sums of rows               193       236       610        508        853

- values: a query head's weights times the rows of its K/V head.
- scores: a query head's numbers times the *columns* of its K/V head's keys, so for each number that of all
  tokens side by side. `resident.py` turns keys that way where decodes stay together for a while; until then
  scores are a batched product, over all the room that is kept: only the room is contiguous from one sequence
  to the next, and products of slices of it are slower than the few more columns. torch makes itself a kernel
  for each length of row, here the room: the first sum with it takes some ten microseconds more.

Knows tensors; knows neither pages nor requests.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn.functional import embedding_bag

# Fewer elements of K than this: SDPA is one call where this is five, and a whole step gains nothing.
FEWEST_ELEMENTS = 1 << 17

# In half precision the weights would be rounded before they weigh; flash kernels keep them in float32.
EXACT_DTYPES = (torch.float32, torch.float64)

# Shapes whose bags are kept: two per kind of layer in a step, and the step before's.
KEPT_BAGS = 8


class WideDecode:
    """Holds the row numbers that the layers of a step share. Engine thread only."""

    def __init__(self) -> None:
        self._bags = lru_cache(maxsize=KEPT_BAGS)(_bags)

    def pays(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether this is the faster way for keys of so many numbers."""
        return num_elements >= FEWEST_ELEMENTS and dtype in EXACT_DTYPES and device.type == "cpu"

    def suits(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether it pays for these and they lie as it needs them: (size, kv_heads, room, dim)."""
        return (
            self.pays(keys.numel(), keys.dtype, keys.device)
            and values.is_contiguous()
            and (keys.is_contiguous() or keys.mT.is_contiguous())
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
        scores = self._scores((query * scale).reshape(batch, group, key_dim), keys)[..., :length]
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

    def _scores(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """(size, kv_heads, group, room) of query (size * kv_heads, group, key_dim)."""
        size, kv_heads, room, key_dim = keys.shape
        batch, group, _ = query.shape
        if keys.is_contiguous():
            products = torch.bmm(query, keys.view(batch, room, key_dim).transpose(1, 2))
        else:
            rows, bag_starts = self._bags(batch, group, key_dim, key_dim)
            columns = keys.mT.view(batch * key_dim, room)
            products = embedding_bag(
                rows, columns, bag_starts, mode="sum", per_sample_weights=query.reshape(-1)
            )
        return products.view(size, kv_heads, group, room)


def _bags(batch: int, group: int, room: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each query head's rows among all K/V heads' `room` rows, and where each head's begin; int32."""
    first_rows = torch.arange(batch, dtype=torch.int32)[:, None, None] * room
    rows = (first_rows + torch.arange(length, dtype=torch.int32)).expand(batch, group, length)
    return rows.reshape(-1), torch.arange(0, batch * group * length, length, dtype=torch.int32)
