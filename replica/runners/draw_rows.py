"""What the sequences of a step want drawn: a row each, and what structures let come next in it.

Knows sequences, structures and rows; knows neither logits nor where they come from.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import numpy as np
import torch

from replica.layers.screened_head import RowsAsked
from replica.output.sampler import DrawRow, takes_largest
from replica.scheduling.runner import ScheduledSequence
from replica.structures.matcher import StructureMatcher


def draw_row(sequence: ScheduledSequence) -> DrawRow | None:
    """None for one whose prompt goes on in the next step."""
    if not sequence.samples:
        return None
    position = sequence.num_tokens
    num_output_tokens = position - sequence.num_prompt_tokens
    return DrawRow(sequence.sampling, sequence.seed, position, num_output_tokens, sequence.token_ids)


def rows_asked(
    rows: list[DrawRow | None], eos_token_ids: frozenset[int], structures: Container[int]
) -> RowsAsked:
    """Of rows that draw: who takes the largest logit, and who does not. structures: rows that have one."""
    largest: list[int] = []
    others: list[int] = []
    for index, row in enumerate(rows):
        if row is not None:
            is_largest = index not in structures and takes_largest(row, eos_token_ids)
            (largest if is_largest else others).append(index)
    return RowsAsked(tuple(largest), tuple(others))


def structures_of(sequences: Sequence[ScheduledSequence]) -> dict[int, StructureMatcher]:
    """By row, of those that draw a token."""
    return {
        row: sequence.structure
        for row, sequence in enumerate(sequences)
        if sequence.structure is not None and sequence.samples
    }


def masks_of(structures: Mapping[int, StructureMatcher]) -> dict[int, torch.Tensor]:
    """What may come next, by row: bits, the lowest first."""
    masks = {}
    for row, structure in structures.items():
        words = np.zeros(structure.num_words, dtype=np.int32)
        structure.fill(words)
        masks[row] = torch.from_numpy(words)
    return masks
