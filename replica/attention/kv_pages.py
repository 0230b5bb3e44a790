"""The K/V pages: one pair of tensors per attention layer, hung on the layer's own module.

Knows block counts, layer shapes and bytes; knows neither requests nor hashes (that is `cache/`).
A page tensor has shape (num_blocks, block_size, kv_heads, head_dim): a slot, `block_id * block_size +
offset`, is one row of its flattened first two axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from replica.memory import free_host_bytes
from replica.transfer import to_device

if TYPE_CHECKING:
    from replica.attention.backend import AttentionBackend, AttentionCall
    from replica.attention.step_batch import StepBatch

# Where a layer's pages hang on its module. Found there rather than passed as an argument, because some
# families (stablelm, nemotron) drop keyword arguments they do not know on the way to attention.
ATTRIBUTE = "_warmpath_pages"

# A million tokens of 16 on CPU: more would only cost bookkeeping, a CPU cannot fill them in a day.
MAX_AUTO_BLOCKS_CPU = 1 << 16


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one token's K and V look like in one layer (they differ between layers in some families)."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    has_sinks: bool = False  # scores per head that take weight and give no value
    window: int | None = field(default=None, compare=False)  # as it told attention; None = all is seen

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


class LayerPages:
    """One layer's pages. Written by the attention function alone, during a forward."""

    __slots__ = ("key_slots", "keys", "owner", "value_slots", "values")

    def __init__(
        self,
        owner: KVPages,
        shape: LayerShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.owner = owner
        # Not zeroed: the system then commits memory as blocks are first used, and starting is fast. A slot
        # is read only after it was written, or zeroed when its block was opened (`write`).
        rows = (num_blocks, block_size, shape.num_kv_heads)
        self.keys = torch.empty(*rows, shape.key_dim, dtype=dtype, device=device)
        self.values = torch.empty(*rows, shape.value_dim, dtype=dtype, device=device)
        self.key_slots = self.keys.view(-1, shape.num_kv_heads, shape.key_dim)
        self.value_slots = self.values.view(-1, shape.num_kv_heads, shape.value_dim)

    def write(self, batch: StepBatch, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store a step's new K and V, or its decodes' alone, each (tokens, kv_heads, dim).

        A block that is opened and not filled is zeroed first. Its unwritten slots are masked when it is
        read, but a masked NaN is still a NaN: without this, what one request left behind in a block
        could spoil the next one that gets it.
        """
        opened_blocks, slots = batch.written_by(key.shape[0])
        if opened_blocks is not None:
            self.keys.index_fill_(0, opened_blocks, 0)
            self.values.index_fill_(0, opened_blocks, 0)
        self.key_slots.index_copy_(0, slots, key)
        self.value_slots.index_copy_(0, slots, value)

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """sources, targets: block ids, (n,); no block is among both."""
        self.keys.index_copy_(0, targets, self.keys.index_select(0, sources))
        self.values.index_copy_(0, targets, self.values.index_select(0, sources))

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store the step's new K and V, then attend: (T, heads, value_dim)."""
        batch = self.owner.batch
        assert batch is not None, "a forward outside ModelRunner.execute"
        self.write(batch, call.key.transpose(0, 1), call.value.transpose(0, 1))
        return self.owner.backend.attend(self, batch, call)


class KVPages:
    """All layers' pages, and the step that is being computed over them.

    `batch` is set by the runner around each forward; the attention function reads it from here.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        shapes: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: AttentionBackend,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.backend = backend
        self.batch: StepBatch | None = None
        self._device = device
        self._modules = list(modules)
        for module, shape in zip(modules, shapes, strict=True):
            pages = LayerPages(self, shape, num_blocks, block_size, dtype, device)
            module.__dict__[ATTRIBUTE] = pages

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks in every layer, between steps. copies: (from, to); no block is among both."""
        if not copies:
            return
        sources, targets = to_device(np.array(copies, dtype=np.int64), self._device).unbind(1)
        for module in self._modules:
            module.__dict__[ATTRIBUTE].copy_blocks(sources, targets)

    def layers(self) -> list[LayerPages]:
        """In the order of the modules."""
        return [module.__dict__[ATTRIBUTE] for module in self._modules]

    def detach(self) -> None:
        """Take the pages off the modules, so that their memory and the backend's is freed. Idempotent."""
        self.backend.close()
        for module in self._modules:
            module.__dict__.pop(ATTRIBUTE, None)
        self._modules = []


def bytes_per_block(shapes: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes one block takes over all layers."""
    return block_size * sum(shape.bytes_per_token(dtype) for shape in shapes)


def free_bytes(device: torch.device) -> int:
    """Memory still to be had on `device`, bytes."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free)
    return free_host_bytes()


def free_share_bytes(device: torch.device, share: float) -> int:
    """Memory still to be had on `device` by a process that may have `share` of a card with others, bytes.

    A card's free memory depends on who started first. What a process may have of it does not, as long as the
    others keep to theirs.
    """
    free = free_bytes(device)
    if device.type != "cuda" or share >= 1:
        return free
    _free, total = torch.cuda.mem_get_info(device)
    return max(0, min(free, int(total * share) - torch.cuda.memory_reserved(device)))


def blocks_from_memory(free: int, fraction: float, block_bytes: int, device: torch.device) -> int:
    """How many blocks `fraction` of `free` bytes holds; at least 1 is not promised."""
    fitting = int(free * fraction) // block_bytes
    return min(fitting, MAX_AUTO_BLOCKS_CPU) if device.type == "cpu" else fitting
