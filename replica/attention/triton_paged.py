"""Attention by Triton kernels that read K and V where they lie: nothing is gathered, nothing repeated.

For CUDA devices; under `TRITON_INTERPRET=1` the same kernels run on a CPU, slowly, for tests. Any block
size, window, softcap and sinks; keys and values up to 256 wide. How a step is cut up is `tiling.py`'s.
Triton is imported when the backend is made, so that who serves without it need not have it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from replica.attention import tiling
from replica.attention.backend import AttentionCall, HeldStep
from replica.attention.kv_pages import LayerPages, LayerShape
from replica.attention.step_batch import PlacedSequence, StepBatch
from replica.attention.step_tables import StepTables
from replica.attention.tiling import Card, Launch, LayerKind, Span
from replica.transfer import to_device

# Triton compiles for no older card.
OLDEST_CAPABILITY = (8, 0)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LOG2_E = 1.4426950408889634

# As good as any: an interpreter runs one program after the other.
INTERPRETED_CARD = Card(processors=1, shared_bytes=tiling.SHARED_BUDGET)


def why_not(device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape]) -> str | None:
    """Why layers of these shapes cannot be served here; None = they can. May import Triton."""
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, which is not installed (it comes with torch for CUDA)"
    if device.type == "cuda":
        if torch.version.hip is not None:
            return "is built for NVIDIA cards; this one is AMD's"
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST_CAPABILITY:
            return (
                f"needs compute capability {_dotted(OLDEST_CAPABILITY)}; {device} has {_dotted(capability)}"
            )
        if is_interpreted():
            return "TRITON_INTERPRET is set: its kernels would be interpreted, on the CPU"
    elif device.type != "cpu" or not is_interpreted():
        return f"runs on CUDA devices; this one is {device} (TRITON_INTERPRET=1 runs it on a CPU, for tests)"
    if dtype not in DTYPES:
        return f"computes float32, float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    widest = max((max(shape.key_dim, shape.value_dim) for shape in shapes), default=0)
    if widest > tiling.MOST_LANES:
        return f"serves heads up to {tiling.MOST_LANES} wide; this model has one of {widest}"
    return _why_nothing_starts(device) if device.type == "cuda" else None


def _why_nothing_starts(device: torch.device) -> str | None:
    """Tried, by the smallest kernel there is: Triton compiles with what the machine has, if it has that."""
    from replica.attention import paged_kernels

    try:
        with on_device(device):
            paged_kernels.touch[(1,)](torch.zeros(1, dtype=torch.int32, device=device))
    except Exception as error:  # whatever compilers, loaders and the driver raise
        if "out of memory" in str(error):  # torch's, the driver's or Triton's own words, in types of each
            return f"cannot start a kernel: {device} has no memory left for it: {error}"
        needs = "a C compiler (gcc, clang, or what CC names) and Python's headers"
        return f"cannot start a kernel here, for which it needs {needs}: {type(error).__name__}: {error}"
    return None


def is_interpreted() -> bool:
    """Whether Triton interprets its kernels in this process. Imports Triton."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """What is launched meanwhile is launched there."""
    # Triton launches on the thread's current device, and the engine's thread begins with the first.
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class TritonPaged:
    """Paged attention by kernels. Engine thread only; keeps the last step's metadata, no scratch memory."""

    name = "triton"

    def __init__(self, device: torch.device, card: Card | None = None) -> None:
        """card: None = the device's own. Only after `why_not` has said None."""
        import triton.language as tl

        from replica.attention import paged_kernels

        self._kernels = paged_kernels
        self._card = card or card_of(device)
        self._device = device
        self._products = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
        if is_interpreted():
            # The interpreter keeps bfloat16 as bits, which it would multiply as integers.
            self._products[torch.bfloat16] = tl.float32
        self._nothing = torch.zeros(1, dtype=torch.float32, device=device)  # for pointers that nobody follows
        self._step: _StepOnDevice | None = None
        self._held: dict[StepBatch, _HeldStepOnDevice] = {}

    def close(self) -> None:
        self._step = None
        self._held.clear()

    def hold(self, batch: StepBatch) -> HeldStep:
        step = self._held[batch] = _HeldStepOnDevice(batch, self._card, self._device)
        return step

    def release(self, batch: StepBatch) -> None:
        self._held.pop(batch, None)

    def _step_of(self, batch: StepBatch) -> _StepOnDevice:
        if (held := self._held.get(batch)) is not None:
            return held
        if self._step is None or self._step.tables.batch is not batch:
            self._step = _StepOnDevice(batch, self._card, self._device)
        return self._step

    def attend(self, pages: LayerPages, batch: StepBatch, call: AttentionCall) -> torch.Tensor:
        heads, num_tokens, key_dim = call.query.shape
        kv_heads, _, value_dim = call.value.shape
        step = self._step_of(batch)
        itemsize = pages.keys.dtype.itemsize
        kind = LayerKind(kv_heads, heads // kv_heads, key_dim, value_dim, call.window, itemsize)
        out = call.query.new_empty(num_tokens, heads, value_dim)
        query = call.query if call.query.stride(2) == 1 else call.query.contiguous()
        with on_device(self._device):
            for planned, tiles in step.launches(kind):
                self._launch(out, query, pages, call, kind, planned, tiles, step)
        return out

    def _launch(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        pages: LayerPages,
        call: AttentionCall,
        kind: LayerKind,
        planned: Launch,
        tiles: torch.Tensor,
        step: _StepOnDevice,
    ) -> None:
        heads, splits = out.shape[1], planned.splitting.splits
        parts = part_sums = self._nothing
        if splits > 1:
            rows = (splits, planned.num_rows, heads)
            parts = torch.empty(*rows, kind.value_dim, dtype=torch.float32, device=self._device)
            # Not every tile has that many splits.
            part_sums = torch.full(rows, float("-inf"), dtype=torch.float32, device=self._device)
        sinks = self._nothing if call.sinks is None else call.sinks
        value_lanes = tiling.lanes(kind.value_dim)
        self._kernels.attend[(len(tiles), kind.kv_heads)](
            out,
            query,
            pages.keys,
            pages.values,
            sinks,
            parts,
            part_sums,
            tiles,
            step.tables.spans,
            step.tables.tables,
            query.stride(0),
            query.stride(1),
            call.scale * LOG2_E if call.softcap is None else call.scale / call.softcap,
            0.0 if call.softcap is None else call.softcap * LOG2_E,
            call.window or 0,
            splits,
            planned.first_row,
            planned.num_rows,
            GROUP=kind.group,
            KV_HEADS=kind.kv_heads,
            KEY_DIM=kind.key_dim,
            KEY_LANES=tiling.lanes(kind.key_dim),
            VALUE_DIM=kind.value_dim,
            VALUE_LANES=value_lanes,
            BLOCK_SIZE=step.tables.batch.block_size,
            ROWS=planned.shape.rows,
            KEYS=planned.shape.keys,
            HAS_WINDOW=call.window is not None,
            HAS_CAP=call.softcap is not None,
            HAS_SINKS=call.sinks is not None,
            PRODUCT=self._products[query.dtype],
            num_warps=planned.shape.num_warps,
            num_stages=planned.shape.num_stages,
        )
        if splits > 1:
            self._kernels.merge[(planned.num_rows, heads)](
                out,
                parts,
                part_sums,
                sinks,
                planned.first_row,
                planned.num_rows,
                splits,
                HEADS=heads,
                VALUE_DIM=kind.value_dim,
                VALUE_LANES=value_lanes,
                MOST_SPLITS=tiling.MOST_SPLITS,
                HAS_SINKS=call.sinks is not None,
                num_warps=4,
            )


class _StepOnDevice:
    """A step's tables on the device, and how each kind of layer is cut up."""

    def __init__(self, batch: StepBatch, card: Card, device: torch.device) -> None:
        self.tables = StepTables(batch, device)
        self._card, self._device = card, device
        self._kinds: dict[LayerKind, list[tuple[Launch, torch.Tensor]]] = {}
        self._spans = _spans(batch.sequences)

    def launches(self, kind: LayerKind) -> list[tuple[Launch, torch.Tensor]]:
        """What a layer of this kind runs, each with its tiles on the device."""
        made = self._kinds.get(kind)
        if made is None:
            made = self._kinds[kind] = [
                (each, to_device(each.tiles, self._device)) for each in self._planned(kind)
            ]
        return made

    def _planned(self, kind: LayerKind) -> list[Launch]:
        return tiling.launches(self._spans, self.tables.batch.num_decodes, kind, self._card)


class _HeldStepOnDevice(_StepOnDevice):
    """Decodes in whose place others are put: the same programs, cut for whoever is there."""

    def __init__(self, batch: StepBatch, card: Card, device: torch.device) -> None:
        """batch: decodes alone, as long as any that will be put there."""
        super().__init__(batch, card, device)
        self._longest = max(each.start + each.num_new for each in batch.sequences)

    def refill(self, sequences: Sequence[PlacedSequence]) -> None:
        self.tables.refill(sequences)
        self._spans = _spans(sequences)
        for kind, [(_, tiles)] in self._kinds.items():
            (now,) = self._planned(kind)
            tiles.copy_(to_device(now.tiles, self._device), non_blocking=True)

    def _planned(self, kind: LayerKind) -> list[Launch]:
        return [tiling.refillable(self._spans, self._longest, kind, self._card)]


def _spans(sequences: Sequence[PlacedSequence]) -> list[Span]:
    return [Span(each.first_row, each.num_new, each.start) for each in sequences]


def card_of(device: torch.device) -> Card:
    """What of this device decides how attention is cut up."""
    if device.type != "cuda":
        return INTERPRETED_CARD
    properties: Any = torch.cuda.get_device_properties(device)  # typed without the newer ones
    return Card(properties.multi_processor_count, properties.shared_memory_per_block_optin)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
