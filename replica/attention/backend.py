"""What every attention backend does, and which one a device gets.

Knows pages, a step's metadata and one layer's query; knows neither requests nor model families.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cache.errors import ConfigError
from replica.attention.kv_pages import LayerPages, LayerShape
from replica.attention.step_batch import StepBatch
from replica.config import BLOCK_SIZES


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention over a whole step. T = the step's tokens, all packed.

    `key` and `value` are the step's new ones, after the rotary embedding; the pages hold them already.
    """

    query: torch.Tensor  # (heads, T, key_dim)
    key: torch.Tensor  # (kv_heads, T, key_dim)
    value: torch.Tensor  # (kv_heads, T, value_dim)
    scale: float  # factor on the scores
    window: int | None  # a query sees its own and the `window - 1` tokens before; None = all
    softcap: float | None  # scores become softcap * tanh(scores / softcap)
    sinks: torch.Tensor | None  # (heads,): a score per head that takes weight and gives no value


class AttentionBackend(Protocol):
    """Attends over pages. Called once per layer and step, from the engine thread."""

    @property
    def name(self) -> str:
        """Shown at start and in the metadata."""

    def attend(self, pages: LayerPages, batch: StepBatch, call: AttentionCall) -> torch.Tensor:
        """(T, heads, value_dim). Reads pages, changes none; may reuse scratch memory between calls."""

    def close(self) -> None:
        """Give back whatever it keeps between calls. Idempotent."""


def choose_backend(
    name: str, device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape]
) -> AttentionBackend:
    """The backend called `name`, for layers of these shapes; for "auto" the one measured on `device`.

    Raises ConfigError with the reason where a backend asked for by name cannot serve them: another is never
    taken in its place. Any block size suits every backend here.
    """
    from replica.attention.gather_sdpa import GatherSdpa

    # The Triton kernels have not been timed on a card, so nobody gets them who did not ask.
    if name in ("auto", GatherSdpa.name):
        return GatherSdpa(device)
    if name == "triton":
        from replica.attention import triton_paged

        reason = triton_paged.why_not(device, dtype, shapes)
        if reason is not None:
            raise ConfigError("attention_backend", name, f"{reason}; use auto or {GatherSdpa.name}")
        return triton_paged.TritonPaged(device)
    raise ConfigError("attention_backend", name, "must be one of " + ", ".join(("auto", *BLOCK_SIZES)))
