"""Some of a model's layers, in a row: those that a part of a prompt goes through in one step.

    step    decodes        part
    1       layers 0 to 5  layers 0, 1
    2       layers 0 to 5          2, 3
    3       layers 0 to 5                4, 5: now it is computed

A step that decodes leaves little time to a prompt. Few tokens through all layers read the whole context for
those few; as much time takes several times the tokens through a part of the layers, and what is read serves
all of them ("layered prefill": Lee et al., MLSys 2026; docs/design/019-scheduling-order.md).
Numbers alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """Layers [first, end) of `total`; not empty."""

    first: int
    end: int
    total: int

    @property
    def is_last(self) -> bool:
        """Whether what went through it has been through all layers."""
        return self.end == self.total

    @property
    def share(self) -> float:
        """Of all layers."""
        return (self.end - self.first) / self.total

    def tokens(self, num_tokens: int) -> int:
        """Its share of a part's tokens. The spans of one part have all of them together."""
        return num_tokens * self.end // self.total - num_tokens * self.first // self.total
