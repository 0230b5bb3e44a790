"""Attention by the package flash-attn, which reads K and V from pages of a multiple of 256 tokens.

Decodes go to its kernel for one row per sequence, which splits long contexts over the card; prefills, with
or without context, to the packed one. Both take the newest token for the last key (causal, aligned bottom
right). Half precision only; windows and softcap, no sinks. Version 2.8's functions were read and imitated for
the tests; the package itself was never run: it builds where CUDA's compiler is.

flash-attn is imported when the backend is made. Knows pages and a step's metadata; knows no requests.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replica.attention.backend import AttentionCall
from replica.attention.kv_pages import LayerPages, LayerShape
from replica.attention.step_batch import StepBatch
from replica.config import BLOCK_SIZES
from replica.transfer import to_device

OLDEST_CAPABILITY = (8, 0)
DTYPES = (torch.float16, torch.bfloat16)
WIDEST_HEAD = 256
HEAD_STEP = 8  # its kernels read 16 bytes at a time
NEEDED_ARGUMENTS = ("block_table", "window_size", "softcap")


@dataclass(frozen=True, slots=True)
class FlashFunctions:
    """The two functions of flash-attn that are called."""

    over_cache: Callable[..., torch.Tensor]  # flash_attn_with_kvcache
    packed: Callable[..., torch.Tensor]  # flash_attn_varlen_func


def why_not(
    device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape], block_size: int
) -> str | None:
    """Why layers of these shapes cannot be served here; None = they can. May import flash-attn."""
    if importlib.util.find_spec("flash_attn") is None:
        return "needs the package flash-attn, which is not installed (in a clone: pip install '.[gpu]')"
    if device.type != "cuda":
        return f"runs on CUDA devices; this one is {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return f"needs compute capability 8.0; {device} has {capability[0]}.{capability[1]}"
    return _why_not_these(dtype, shapes, block_size) or _why_not_this_version()


def _why_not_these(dtype: torch.dtype, shapes: Sequence[LayerShape], block_size: int) -> str | None:
    if dtype not in DTYPES:
        return f"computes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    sizes = BLOCK_SIZES["flash_attn"]
    if block_size not in sizes:
        return f"reads blocks of a multiple of {sizes.step} tokens; block_size is {block_size}"
    for shape in shapes:
        if shape.has_sinks:
            return "has no attention sinks, which this model's layers have"
        if shape.key_dim != shape.value_dim:
            return (
                f"wants keys as wide as values; this model's are {shape.key_dim} and {shape.value_dim} wide"
            )
        if shape.key_dim > WIDEST_HEAD or shape.key_dim % HEAD_STEP:
            return (
                f"serves heads up to {WIDEST_HEAD} wide, in steps of {HEAD_STEP}; "
                f"this model has one of {shape.key_dim}"
            )
    return None


def _why_not_this_version() -> str | None:
    """Its signatures are looked at, not its version number."""
    try:
        functions = _functions()
    except ImportError as error:
        return f"cannot be imported: {error}"
    except AttributeError as error:
        return f"is not flash-attn 2, whose functions are called: {error}"
    for function in (functions.over_cache, functions.packed):
        known = inspect.signature(function).parameters
        lacking = [name for name in NEEDED_ARGUMENTS if name not in known]
        if lacking:
            return f"is too old: its functions take no {', '.join(lacking)}"
    return None


def _functions() -> FlashFunctions:
    module: Any = importlib.import_module("flash_attn")
    return FlashFunctions(module.flash_attn_with_kvcache, module.flash_attn_varlen_func)


class FlashPaged:
    """Paged attention by flash-attn. Engine thread only; keeps the last step's metadata, no scratch."""

    name = "flash_attn"

    def __init__(self, device: torch.device, functions: FlashFunctions | None = None) -> None:
        """functions: None = the package's. Only after `why_not` has said None."""
        self._device = device
        self._functions = functions or _functions()
        self._step: _StepOnDevice | None = None

    def close(self) -> None:
        self._step = None

    def attend(self, pages: LayerPages, batch: StepBatch, call: AttentionCall) -> torch.Tensor:
        if self._step is None or self._step.batch is not batch:
            self._step = _StepOnDevice(batch, self._device)
        step, decodes = self._step, batch.num_decodes
        query = call.query.transpose(0, 1)  # (T, heads, key_dim)
        options = {
            "softmax_scale": call.scale,
            "causal": True,
            # Keys to the left of a row's own that it sees: one fewer than the window, which counts its own.
            "window_size": (-1, -1) if call.window is None else (call.window - 1, 0),
            "softcap": call.softcap or 0.0,
        }
        parts = []
        if decodes:
            attended = self._functions.over_cache(
                query[:decodes].unsqueeze(1),
                pages.keys,
                pages.values,
                cache_seqlens=step.lengths[:decodes],
                block_table=step.tables[:decodes],
                **options,
            )
            parts.append(attended.squeeze(1))
        if decodes < len(batch.sequences):
            parts.append(
                self._functions.packed(
                    query[decodes:],
                    pages.keys,
                    pages.values,
                    cu_seqlens_q=step.row_bounds,
                    cu_seqlens_k=step.key_bounds,
                    max_seqlen_q=step.most_rows,
                    max_seqlen_k=step.most_keys,
                    block_table=step.tables[decodes:],
                    **options,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _StepOnDevice:
    """A step's lengths and block tables, int32, in row order; bounds are those of its prefills."""

    def __init__(self, batch: StepBatch, device: torch.device) -> None:
        self.batch = batch
        sequences, decodes = batch.sequences, batch.num_decodes
        ends = np.array([each.start + each.num_new for each in sequences], dtype=np.int32)
        used = -(-ends // batch.block_size)
        tables = np.zeros((len(sequences), int(used.max())), dtype=np.int32)
        for row, (each, count) in enumerate(zip(sequences, used.tolist(), strict=True)):
            tables[row, :count] = each.block_table[:count]
        num_new = [each.num_new for each in sequences[decodes:]]
        self.most_rows = max(num_new, default=0)
        self.most_keys = int(ends[decodes:].max()) if num_new else 0

        def on_device(values: Any) -> torch.Tensor:
            return to_device(np.ascontiguousarray(values, dtype=np.int32), device)

        self.lengths, self.tables = on_device(ends), on_device(tables)
        self.row_bounds = on_device(np.cumsum([0, *num_new]))
        self.key_bounds = on_device(np.cumsum([0, *ends[decodes:].tolist()]))
