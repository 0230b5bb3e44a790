"""A part of a prompt that goes through the model's layers over several steps, beside steps that are whole.

              rows of decodes   rows of the part
    layer 0   ───────────────   (been there: kept since the last step)
          1   ───────────────   ────────────────   enter: kept rows join those of the decodes
          2   ───────────────   ────────────────   leave: kept for the next step
          3   ───────────────

The other layers are given the decodes' rows alone. Knows layers and rows; knows neither pages nor requests
but for their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from replica.scheduling.layer_span import LayerSpan
from replica.scheduling.runner import ScheduledSequence

Embeddings = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each (1, T, dim)."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """What has been through the first layers."""

    part: tuple[str, int, int]  # request, start, tokens
    num_layers: int
    rows: torch.Tensor  # (1, tokens, width)


class LayeredPart:
    """Of a model whose `layers` are called in this order, with their rows first. Engine thread only."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = list(layers)
        self._kept: _Kept | None = None

    @contextmanager
    def sent(self, sequence: ScheduledSequence, num_before: int) -> Iterator[None]:
        """The model's forwards meanwhile are of one step, whose rows after the first `num_before` are this
        sequence's: they go through its layers. Several are of the same rows. `num_before`: at least 1.

        Raises RuntimeError if the layers before those were others'. What raises meanwhile changes nothing.
        """
        span = sequence.layers
        assert span is not None, "it goes through all layers"
        assert num_before, "what is alone goes through all layers"
        part = (sequence.request_id, sequence.start, sequence.num_new_tokens)
        kept = self._kept
        if span.first and (kept is None or (kept.part, kept.num_layers) != (part, span.first)):
            raise RuntimeError("a part of a prompt goes on that has not been through the layers before")
        passage = _Passage(span, num_before, part[2], kept.rows if kept is not None and span.first else None)
        with ExitStack() as hooks:
            for number, layer in enumerate(self._layers):
                hooks.callback(
                    layer.register_forward_pre_hook(partial(passage.enter, number), with_kwargs=True).remove
                )
            last = self._layers[span.end - 1]
            hooks.callback(last.register_forward_hook(passage.leave).remove)
            yield
        self._kept = None if passage.left is None else _Kept(part, span.end, passage.left)


class _Passage:
    """One step's."""

    def __init__(
        self, span: LayerSpan, num_before: int, num_tokens: int, entering: torch.Tensor | None
    ) -> None:
        self._span = span
        self._num_before, self._num_rows = num_before, num_before + num_tokens
        self._entering = entering  # None: they come with the others
        self._narrowed: dict[int, tuple[Embeddings, Embeddings]] = {}  # by identity, and so held
        self.left: torch.Tensor | None = None

    def enter(
        self, number: int, _layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the layer is given in place of what it was called with."""
        span, others = self._span, dict(options)
        rows: torch.Tensor = args[0] if args else others.pop("hidden_states")
        if not span.first <= number < span.end:
            rows = rows[:, : self._num_before]
            others["position_embeddings"] = self._of_decodes(others["position_embeddings"])
            return (rows, *args[1:]), others
        if number == span.first and self._entering is not None:
            rows = torch.cat([rows[:, : self._num_before], self._entering], dim=1)
        assert rows.shape[1] == self._num_rows, "the layers are called in another order"
        return (rows, *args[1:]), others

    def leave(self, _layer: nn.Module, _args: Any, rows: torch.Tensor) -> torch.Tensor | None:
        """What the last of the layers hands on; None: all of it."""
        if self._span.is_last:
            return None
        self.left = rows[:, self._num_before :].clone()
        return rows[:, : self._num_before]

    def _of_decodes(self, embeddings: Embeddings) -> Embeddings:
        """The same tensors for all layers that are given the same: what they make of them is kept."""
        found = self._narrowed.get(id(embeddings[0]))
        if found is None:
            cosines, sines = embeddings
            narrowed = (cosines[:, : self._num_before], sines[:, : self._num_before])
            found = self._narrowed[id(cosines)] = (embeddings, narrowed)
        return found[1]
