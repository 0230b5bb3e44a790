"""Attention from plain torch operations: gather the blocks, then scaled-dot-product attention.

Runs on any device and for any block size, window, softcap or sinks; the backend of CPUs, and what
others are measured against.

- A decode attends as one row per query head, grouped by K/V head: the query heads that share a K/V
  head become that head's query axis, so K and V are never repeated. Where many sequences' K and V are
  kept side by side, two products take SDPA's place (`wide_decode.py`).
- A prefill on a CPU is attentions over the context and over the new tokens, without any mask, merged by
  their weights (`cpu_flash.py`).
- Where that kernel is missing, a prefill without context is plain causal attention over the K and V just
  computed, and with context one attention with the causal mask as a bias.
- On a card SDPA is torch's own kernels. cuDNN's, which torch 2.11 takes first on an H100, makes a plan for
  every number of keys it meets, in tens of milliseconds, and keeps them all: one for every step of decodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.functional import scaled_dot_product_attention

from replica.attention.backend import AttentionCall
from replica.attention.cpu_flash import CpuFlash
from replica.attention.kv_pages import LayerPages
from replica.attention.resident import ResidentDecodes
from replica.attention.step_batch import DecodeGroup, PrefillPiece, StepBatch
from replica.attention.wide_decode import WideDecode

# The explicit formula keeps its scores under this many elements (256 MiB of float32) at a time.
MAX_EXPLICIT_SCORES = 1 << 26


class GatherSdpa:
    """Gather + SDPA. Not thread-safe: owns the scratch memory that gathers write into."""

    name = "gather_sdpa"

    def __init__(self, device: torch.device) -> None:
        self._is_card = device.type == "cuda"
        self._scratch: dict[tuple[str, tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self._flash = CpuFlash.find(device)
        self._resident = ResidentDecodes()
        self._wide = WideDecode()

    def close(self) -> None:
        self._scratch.clear()
        self._resident = ResidentDecodes()

    def attend(self, pages: LayerPages, batch: StepBatch, call: AttentionCall) -> torch.Tensor:
        if not self._is_card:
            return self._attend(pages, batch, call)
        with _without_cudnn():
            return self._attend(pages, batch, call)

    def _attend(self, pages: LayerPages, batch: StepBatch, call: AttentionCall) -> torch.Tensor:
        heads, num_tokens, _ = call.query.shape
        self._resident.begin(batch)
        groups = batch.decode_groups(call.window)
        if len(groups) == 1 and groups[0].size == num_tokens:  # decodes only: nothing to put together
            keys, values = self._decoded_keys_and_values(pages, batch, 0, groups[0], call)
            return self._decode(groups[0], call, keys, values)
        out = call.query.new_empty(num_tokens, heads, call.value.shape[2])
        for index, group in enumerate(groups):
            keys, values = self._decoded_keys_and_values(pages, batch, index, group, call)
            out[group.first_row : group.first_row + group.size] = self._decode(group, call, keys, values)
        if num_tokens == batch.num_decodes:  # all there is, or all that this layer is given
            return out
        for piece in batch.prefill_pieces(call.window):
            rows = slice(piece.first_row, piece.first_row + piece.num_tokens)
            out[rows] = self._prefill(pages, batch, piece, call).transpose(0, 1)
        return out

    # -- decodes ----------------------------------------------------------------------------------

    def _decoded_keys_and_values(
        self, pages: LayerPages, batch: StepBatch, index: int, group: DecodeGroup, call: AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A group's keys and values, (size, kv_heads, at least length, dim) each; its `length` count."""
        rows = slice(group.first_row, group.first_row + group.size)
        age = self._resident.age_of(batch, call.window, index)
        new_key, new_value = call.key[:, rows].transpose(0, 1), call.value[:, rows].transpose(0, 1)
        turns = call.is_plain and self._wide.pays(
            new_key.numel() * group.length, new_key.dtype, new_key.device
        )
        kept = self._resident.added(pages, age, index, new_key, new_value, turns=turns)
        if kept is not None:
            return kept
        keys, values = (
            gathered.view(group.size, -1, *gathered.shape[2:]).transpose(1, 2)[:, :, : group.length]
            for gathered in self._gather(pages, group.block_ids)
        )
        self._resident.keep(pages, age, index, keys, values)
        return keys, values

    def _decode(
        self, group: DecodeGroup, call: AttentionCall, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """(size, heads, value_dim). K and V are not repeated: a K/V head's query heads are its query axis."""
        heads, _, key_dim = call.query.shape
        kv_heads = keys.shape[1]
        rows = slice(group.first_row, group.first_row + group.size)
        query = call.query[:, rows].transpose(0, 1).reshape(group.size, kv_heads, -1, key_dim)
        if call.is_plain and self._wide.suits(keys, values):
            attended = self._wide.attend(
                query, keys, values, length=group.length, bias=group.bias, scale=call.scale
            )
        else:
            keys, values = keys[:, :, : group.length], values[:, :, : group.length]
            if call.is_plain:
                attended = scaled_dot_product_attention(
                    query, keys, values, attn_mask=group.bias, scale=call.scale
                )
            else:
                bias = None if group.bias is None else group.bias.unsqueeze(1)
                attended = _explicit(query.unsqueeze(3), keys, values, bias, call)
        return attended.reshape(group.size, heads, values.shape[3])

    # -- prefills ---------------------------------------------------------------------------------

    def _prefill(
        self, pages: LayerPages, batch: StepBatch, piece: PrefillPiece, call: AttentionCall
    ) -> torch.Tensor:
        """(heads, num_tokens, value_dim)"""
        heads, _, key_dim = call.query.shape
        kv_heads, _, value_dim = call.value.shape
        rows = slice(piece.first_row, piece.first_row + piece.num_tokens)
        # K/V heads become the batch axis and the query heads of each its heads: K and V are then shared
        # by stride 0 instead of being repeated.
        query = call.query[:, rows].view(kv_heads, heads // kv_heads, piece.num_tokens, key_dim)
        key, value = call.key[:, rows], call.value[:, rows]
        context = self._context(pages, piece) if piece.block_ids is not None else None
        is_plain = call.is_plain and piece.bias is None
        if is_plain and self._flash is not None and key_dim == value_dim:
            attended = self._flash.attend(query, (key, value), context, call.scale)
        elif is_plain and context is None:
            attended = _attend_causally(query, key, value, call.scale)
        else:
            if context is not None:
                key, value = torch.cat([context[0], key], dim=1), torch.cat([context[1], value], dim=1)
            bias = piece.bias if piece.bias is not None else batch.causal_bias(piece)
            if call.softcap is not None or call.sinks is not None:
                attended = _explicit(query[None], key[None], value[None], bias, call)[0]
            else:
                attended = _attend_with_bias(query, key, value, bias, call.scale)
        return attended.reshape(heads, piece.num_tokens, value_dim)

    def _context(self, pages: LayerPages, piece: PrefillPiece) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the piece's context, each (kv_heads, num_context, dim); views of scratch memory."""
        assert piece.block_ids is not None
        keys, values = self._gather(pages, piece.block_ids)
        return (
            keys.flatten(0, 1)[: piece.num_context].transpose(0, 1),
            values.flatten(0, 1)[: piece.num_context].transpose(0, 1),
        )

    # -- scratch ----------------------------------------------------------------------------------

    def _gather(self, pages: LayerPages, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks' K and V, (blocks, block_size, kv_heads, dim); valid until the next gather.

        Scratch is reused: a fresh buffer of more than a few MB is mapped and unmapped by the kernel in
        every layer, which costs more than the copy.
        """
        return (
            torch.index_select(
                pages.keys, 0, block_ids, out=self._buffer("keys", pages.keys, block_ids.numel())
            ),
            torch.index_select(
                pages.values, 0, block_ids, out=self._buffer("values", pages.values, block_ids.numel())
            ),
        )

    def _buffer(self, kind: str, like: torch.Tensor, count: int) -> torch.Tensor:
        key = (kind, tuple(like.shape[1:]), like.dtype)
        buffer = self._scratch.get(key)
        if buffer is None or buffer.shape[0] < count:
            rounded = 1 << max(6, (count - 1).bit_length())  # grows by doubling, not at every longer context
            self._scratch.pop(key, None)
            buffer = self._scratch[key] = like.new_empty(rounded, *like.shape[1:])
        return buffer[:count]


@contextmanager
def _without_cudnn() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _attend_causally(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Query i sees keys up to i. query (kv_heads, group, n, dim); key, value (kv_heads, n, dim)."""
    shape = (*query.shape[:2], *key.shape[1:])
    values = value[:, None].expand(*query.shape[:2], *value.shape[1:])
    return scaled_dot_product_attention(
        query, key[:, None].expand(shape), values, is_causal=True, scale=scale
    )


def _attend_with_bias(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    """As `_attend_causally`, with bias (n, keys) added to the scores in place of the causal rule."""
    keys = key[:, None].expand(*query.shape[:2], *key.shape[1:])
    values = value[:, None].expand(*query.shape[:2], *value.shape[1:])
    return scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale)


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    call: AttentionCall,
) -> torch.Tensor:
    """The formula spelled out, for softcap and sinks, which SDPA does not have.

    query (batch, kv_heads, group, n, dim), key and value (batch, kv_heads, keys, dim), bias broadcast
    against (batch, 1, 1, n, keys). Query rows are tiled to bound the scores' memory.
    """
    batch, kv_heads, group, num_rows, _ = query.shape
    num_keys = key.shape[2]
    tile = max(1, MAX_EXPLICIT_SCORES // (batch * kv_heads * group * num_keys))
    sinks = None if call.sinks is None else call.sinks.view(kv_heads, group, 1, 1)
    tiles = []
    for first in range(0, num_rows, tile):
        part = query[:, :, :, first : first + tile]
        rows = part.shape[3]
        # Group and rows fold into one axis: a broadcast matmul would copy the keys once per query head.
        scores = (
            torch.matmul(part.reshape(batch, kv_heads, group * rows, -1), key.transpose(2, 3)) * call.scale
        )
        scores = scores.view(batch, kv_heads, group, rows, num_keys)
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        if bias is not None:
            scores = scores + (bias[..., first : first + tile, :] if bias.shape[-2] == num_rows else bias)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores.dtype).expand(batch, -1, -1, rows, 1)], dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., :num_keys]
        folded = weights.reshape(batch, kv_heads, group * rows, num_keys)
        tiles.append(torch.matmul(folded, value).view(batch, kv_heads, group, rows, -1))
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=3)
