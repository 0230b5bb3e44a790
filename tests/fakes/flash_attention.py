"""The two functions of flash-attn 2.8 that are called, as documented, in plain torch and row by row.

As picky as the real ones about types and layouts, and they read nothing that a mask hides.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from replica.attention.flash_paged import FlashFunctions


def flash_attn_with_kvcache(
    q: torch.Tensor,  # (batch, rows, heads, dim)
    k_cache: torch.Tensor,  # (blocks, block_size, kv_heads, dim)
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    assert k is None
    assert v is None
    assert cache_seqlens is not None
    assert block_table is not None
    assert q.dim() == 4
    assert cache_seqlens.shape == (q.shape[0],)
    out = [
        _attend(rows, k_cache, v_cache, table, length, softmax_scale, causal, window_size, softcap)
        for rows, table, length in zip(q, block_table, _lengths(cache_seqlens), strict=True)
    ]
    return torch.stack(out)


def flash_attn_varlen_func(
    q: torch.Tensor,  # (rows of all, heads, dim)
    k: torch.Tensor,  # with a block table: (blocks, block_size, kv_heads, dim)
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    assert dropout_p == 0.0
    assert block_table is not None
    assert q.dim() == 3
    rows, keys = _lengths(cu_seqlens_q), _lengths(cu_seqlens_k)
    assert len(rows) == len(keys) == len(block_table) + 1
    assert (rows[0], rows[-1], keys[0]) == (0, len(q), 0)
    counts = [after - before for before, after in pairwise(rows)]
    lengths = [after - before for before, after in pairwise(keys)]
    assert (max(counts), max(lengths)) == (max_seqlen_q, max_seqlen_k)
    out = [
        _attend(q[first : first + count], k, v, table, length, softmax_scale, causal, window_size, softcap)
        for first, count, table, length in zip(rows, counts, block_table, lengths, strict=False)
    ]
    return torch.cat(out)


FLASH = FlashFunctions(flash_attn_with_kvcache, flash_attn_varlen_func)


def _lengths(values: torch.Tensor) -> list[int]:
    assert values.dtype == torch.int32
    assert values.is_contiguous()
    return values.tolist()


def _attend(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    table: torch.Tensor,
    length: int,
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """One sequence: (rows, heads, dim). The last row is that of the last key."""
    assert query.stride(-1) == 1
    assert table.dtype == torch.int32
    assert causal
    assert key_pages.shape == value_pages.shape
    num_rows, heads, dim = query.shape
    block_size, kv_heads = key_pages.shape[1:3]
    blocks = table[: -(-length // block_size)].long()
    keys, values = (pages[blocks].flatten(0, 1)[:length] for pages in (key_pages, value_pages))
    left, right = window_size
    assert right in (-1, 0)
    out = torch.empty_like(query)
    for row in range(num_rows):
        position = length - num_rows + row
        first = 0 if left < 0 else max(0, position - left)
        for head in range(heads):
            of_head = slice(first, position + 1), head * kv_heads // heads
            scores = keys[of_head].double() @ query[row, head].double() * (scale or dim**-0.5)
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            assert not math.isnan(float(scores.sum())), "a key was read that nobody wrote"
            out[row, head] = (scores.softmax(0) @ values[of_head].double()).to(query.dtype)
    return out
