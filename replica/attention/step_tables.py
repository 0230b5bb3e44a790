"""A step's sequences and their block tables as kernels read them: int32, on the device, in row order.

    spans   (4 * sequences,): first row of the step, new tokens, first position, first entry in `tables`
    tables  block ids, one sequence's after the other

Knows a step's metadata; knows neither kernels nor how they are launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from replica.attention.step_batch import PlacedSequence, StepBatch
from replica.transfer import to_device

NUMBERS_PER_SPAN = 4


class StepTables:
    """One step's; or, filled again and again, those of every step of the same shape."""

    def __init__(self, batch: StepBatch, device: torch.device) -> None:
        self.batch = batch
        self._device = device
        # A table may hold blocks that the sequence will need only later: those are left out.
        self._counts = [_num_blocks(each, batch.block_size) for each in batch.sequences]
        first_entries = np.cumsum([0, *self._counts])
        self._first_entries, self._num_entries = first_entries[:-1].tolist(), int(first_entries[-1])
        # One copy for both.
        self._packed = to_device(self._pack(batch.sequences), device)
        split = NUMBERS_PER_SPAN * len(batch.sequences)
        self.spans, self.tables = self._packed[:split], self._packed[split:]

    def refill(self, sequences: Sequence[PlacedSequence]) -> None:
        """In place: other sequences, as many as before, none with more blocks than the one before it had."""
        assert len(sequences) == len(self._counts)
        self._packed.copy_(to_device(self._pack(sequences), self._device), non_blocking=True)

    def _pack(self, sequences: Sequence[PlacedSequence]) -> npt.NDArray[np.int32]:
        split = NUMBERS_PER_SPAN * len(sequences)
        packed = np.zeros(split + self._num_entries, dtype=np.int32)
        packed[:split] = list(
            chain.from_iterable(
                (each.first_row, each.num_new, each.start, entry)
                for each, entry in zip(sequences, self._first_entries, strict=True)
            )
        )
        for each, room, entry in zip(sequences, self._counts, self._first_entries, strict=True):
            count = _num_blocks(each, self.batch.block_size)
            assert count <= room, "more blocks than there is room for"
            packed[split + entry : split + entry + count] = each.block_table[:count]
        return packed


def _num_blocks(sequence: PlacedSequence, block_size: int) -> int:
    return -(-(sequence.start + sequence.num_new) // block_size)
