"""What every attention backend does, and which one a device gets.

Knows pages, a step's metadata and one layer's query; knows neither requests nor model families.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from cache.errors import ConfigError
from replica.attention.kv_pages import LayerPages, LayerShape
from replica.attention.step_batch import PlacedSequence, StepBatch
from replica.config import BLOCK_SIZES

logger = logging.getLogger(__name__)


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

    @property
    def is_plain(self) -> bool:
        """Whether nothing but scaled scores and the mask decides the weights."""
        return self.softcap is None and self.sinks is None


class AttentionBackend(Protocol):
    """Attends over pages. Called once per layer and step, from the engine thread."""

    @property
    def name(self) -> str:
        """Shown at start and in the metadata."""

    def attend(self, pages: LayerPages, batch: StepBatch, call: AttentionCall) -> torch.Tensor:
        """(T, heads, value_dim). Reads pages, changes none; may reuse scratch memory between calls."""

    def close(self) -> None:
        """Give back whatever it keeps between calls. Idempotent."""


class HeldStep(Protocol):
    """A step whose tensors stay where they are while other sequences are put into it."""

    def refill(self, sequences: Sequence[PlacedSequence]) -> None:
        """In place: other sequences, as many as before, none longer than those it was held for.

        Copies to the device; does not wait for it.
        """


@runtime_checkable
class HoldingBackend(AttentionBackend, Protocol):
    """Can attend in a step that is recorded, and replayed after other sequences were put into its tables.

    It reads no slot that was never written, and launches the same work for all steps of a shape.
    """

    def hold(self, batch: StepBatch) -> HeldStep:
        """Keep this step's tables until `release`. batch: decodes, as long as any that will be put there."""

    def release(self, batch: StepBatch) -> None:
        """Forget it. Idempotent."""


def choose_backend(
    name: str, device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape], block_size: int
) -> AttentionBackend:
    """The backend called `name`, for layers of these shapes; for "auto" as `settled`.

    Raises ConfigError as `check_served`: another is never taken in its place.
    """
    name = settled(name, device, dtype, shapes)
    check_served(name, device, dtype, shapes, block_size)
    if name == "triton":
        from replica.attention.triton_paged import TritonPaged

        return TritonPaged(device)
    if name == "flash_attn":
        from replica.attention.flash_paged import FlashPaged

        return FlashPaged(device)
    from replica.attention.gather_sdpa import GatherSdpa

    return GatherSdpa(device)


def settled(name: str, device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape]) -> str:
    """Which backend "auto" is for such layers; any other name is itself.

    Triton's kernels where they were measured to be faster: on cards, in half precision. Full float32 takes no
    tensor cores there, and was not timed.
    """
    if name != "auto":
        return name
    if device.type != "cuda" or dtype.itemsize != 2:
        return "gather_sdpa"
    from replica.attention import triton_paged

    reason = triton_paged.why_not(device, dtype, shapes)
    if reason is not None:
        logger.warning("attention by torch's own operations, which are slower", extra={"triton": reason})
    return "triton" if reason is None else "gather_sdpa"


def check_served(
    name: str, device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape], block_size: int
) -> None:
    """Raises ConfigError with the reason where the backend called `name` cannot serve such layers.

    shapes: none, where they are not known yet: then whatever depends on them is let pass.
    """
    if name in ("auto", "gather_sdpa"):  # one of the others is not taken where it could not serve
        return
    if name not in BLOCK_SIZES:
        raise ConfigError("attention_backend", name, "must be one of " + ", ".join(("auto", *BLOCK_SIZES)))
    if name == "triton":
        from replica.attention import triton_paged

        reason = triton_paged.why_not(device, dtype, shapes)
    else:
        from replica.attention import flash_paged

        reason = flash_paged.why_not(device, dtype, shapes, block_size)
    if reason is not None:
        raise ConfigError("attention_backend", name, f"{reason}; use auto or gather_sdpa")
