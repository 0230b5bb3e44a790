"""Which blocks were held once: what tells an evicted block from one that nobody has ever computed.

Two Bloom filters, a current and a previous one; when the current one is full it becomes the previous and
the oldest half of the memory is forgotten at once. So the most recent `capacity / 2` blocks at least are
remembered, in constant memory, and at capacity one block in two hundred is remembered that never was.

Knows 64-bit hints; knows neither replicas nor tokens. Owner: the router's event loop.
Source: Bloom, Space/time trade-offs in hash coding with allowable errors, 1970 (3 cells of 16 per entry).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cache.types import HashHint

Words = NDArray[np.uint64]
"""Hints or other 64-bit values, shape (n,)."""

_CELLS_PER_ENTRY = 16
_MAX_PENDING = 4096  # hints that wait to be entered together: a batch of events is often a handful
_MIXER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: makes a second, independent hash of a hint


def as_words(hints: Sequence[HashHint]) -> Words:
    """The hints as 64-bit words, in order."""
    return np.asarray(hints, dtype=np.uint64)


class HeldMemory:
    """A bounded, approximate set of hints. 16 bytes per block remembered, allocated as it fills."""

    def __init__(self, capacity: int = 1 << 20) -> None:
        """capacity: blocks; a power of two."""
        if capacity < 2 or capacity & (capacity - 1):
            raise ValueError(f"capacity = {capacity} is not a power of two")
        self._per_generation = capacity // 2
        self._num_cells = self._per_generation * _CELLS_PER_ENTRY
        self._high_shift = np.uint64(64 - (self._num_cells.bit_length() - 1))
        self._low_shift = np.uint64(1)
        self._mask = np.uint64(self._num_cells - 1)
        self._current = self._empty()
        self._previous = self._empty()
        self._num_current = 0
        self._has_previous = False
        self._pending: list[Words] = []
        self._num_pending = 0

    @property
    def num_bytes(self) -> int:
        """At most; pages never written to take none."""
        return self._current.nbytes + self._previous.nbytes

    def record(self, words: Words) -> None:
        """These blocks are or were held somewhere. Amortised: entered together with the next look-up."""
        self._pending.append(words)
        self._num_pending += len(words)
        if self._num_pending >= _MAX_PENDING:
            self._enter_pending()

    def knows(self, words: Words) -> NDArray[np.bool_]:
        """Which of these were recorded, shape (n,). O(n)."""
        self._enter_pending()
        if not self._num_current and not self._has_previous:
            return np.zeros(len(words), dtype=np.bool_)
        cells = self._cells(words)
        known = _in_all(self._current, cells)
        if self._has_previous:
            known |= _in_all(self._previous, cells)
        return known

    def _enter_pending(self) -> None:
        if not self._pending:
            return
        words = np.concatenate(self._pending)
        self._pending.clear()
        self._num_pending = 0
        for start in range(0, len(words), self._per_generation):
            self._enter(words[start : start + self._per_generation])

    def _enter(self, words: Words) -> None:
        if self._num_current + len(words) > self._per_generation:
            self._previous, self._current = self._current, self._empty()
            self._num_current, self._has_previous = 0, True
        self._num_current += len(words)
        for cells in self._cells(words):
            self._current[cells] = True

    def _cells(self, words: Words) -> tuple[NDArray[np.intp], ...]:
        """Three cells of each."""
        mixed = words * _MIXER
        return (
            (words >> self._high_shift).astype(np.intp),
            ((words >> self._low_shift) & self._mask).astype(np.intp),
            (mixed >> self._high_shift).astype(np.intp),
        )

    def _empty(self) -> NDArray[np.bool_]:
        return np.zeros(self._num_cells, dtype=np.bool_)


def _in_all(table: NDArray[np.bool_], cells: tuple[NDArray[np.intp], ...]) -> NDArray[np.bool_]:
    first, second, third = cells
    found: NDArray[np.bool_] = table[first] & table[second] & table[third]
    return found
