"""How often blocks were used lately: a count for each hint, in two generations; the older one is dropped.

A use of a block is a use of its parents, so counts fall along a chain, and who asks how far it was used so
often looks at a few of its blocks. Every request has every so many blocks of its prompt counted: in C where
that is compiled (`native/uses.c`), in tables of 16 bytes a slot.

Knows 64-bit hints; knows neither replicas nor tokens. Owner: the router's event loop.
"""

from __future__ import annotations

import secrets
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

try:
    import router.native.uses as compiled
except ModuleNotFoundError:  # no C compiler where this was installed: the same, in dictionaries
    compiled = None  # type: ignore[assignment]

from cache.types import HashHint

IS_COMPILED = compiled is not None  # whether uses are counted in C

Table = NDArray[np.uint64]
"""Shape (slots, 2): a hint, and how often it was used; 0: nothing is there."""


class UseCounts(Protocol):
    """Of this generation and the one before."""

    @property
    def num_new(self) -> int:
        """Hints counted in this generation."""

    @property
    def num_entries(self) -> int:
        """Of both."""

    def add(self, hints: Sequence[HashHint], stride: int) -> None:
        """A prompt used them, of which every `stride`-th is counted. Those for which this generation has no
        room are not. O(hints / stride)."""

    def leading(self, hints: Sequence[HashHint], stride: int, least: float) -> int:
        """How many of a chain were used so often (above 0), rounded down to the stride. O(log(those))."""

    def total(self, hints: Iterable[HashHint]) -> int:
        """Uses of these, all together. O(hints)."""

    def turn(self, *, forget: bool) -> None:
        """A new generation. forget: the one that ends, too."""


def use_counts(max_entries: int) -> UseCounts:
    """max_entries: of one generation."""
    return PackedCounts(max_entries) if IS_COMPILED else DictCounts(max_entries)


class DictCounts:
    """Without what is compiled, which does as this does."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._current: Counter[HashHint] = Counter()
        self._previous: Counter[HashHint] = Counter()

    @property
    def num_new(self) -> int:
        return len(self._current)

    @property
    def num_entries(self) -> int:
        return len(self._current) + len(self._previous)

    def add(self, hints: Sequence[HashHint], stride: int) -> None:
        counted = hints[stride - 1 :: stride]
        if len(self._current) + len(counted) <= self._max_entries:
            self._current.update(counted)
            return
        for hint in counted:
            if len(self._current) < self._max_entries or hint in self._current:
                self._current[hint] += 1

    def leading(self, hints: Sequence[HashHint], stride: int, least: float) -> int:
        current, previous = self._current.get, self._previous.get
        low, high = 0, len(hints) // stride
        middle = 0  # most prompts have no hot prefix, or a short one: from the front in growing steps
        while low < high:
            hint = hints[(middle + 1) * stride - 1]
            if current(hint, 0) + previous(hint, 0) >= least:
                low = middle + 1
                middle = min(2 * middle + 1, (low + high) // 2)
            else:
                high = middle
                middle = (low + high) // 2
        return low * stride

    def total(self, hints: Iterable[HashHint]) -> int:
        current, previous = self._current.get, self._previous.get
        return sum([current(hint, 0) + previous(hint, 0) for hint in hints])

    def turn(self, *, forget: bool) -> None:
        self._previous = Counter() if forget else self._current
        self._current = Counter()


class PackedCounts:
    """In tables, by C. At most half of one is in use."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._num_slots = 2 << (max_entries - 1).bit_length()
        self._factor = secrets.randbits(64) | 1  # so that nobody can make prompts of one slot
        self._num_new = self._num_before = 0
        self._tables = self._new_table(), self._new_table()  # of this generation, and the one before

    @property
    def num_new(self) -> int:
        return self._num_new

    @property
    def num_entries(self) -> int:
        return self._num_new + self._num_before

    def add(self, hints: Sequence[HashHint], stride: int) -> None:
        self._num_new = compiled.add(
            self._tables[0], self._factor, self._num_new, self._max_entries, _packed(hints), stride
        )

    def leading(self, hints: Sequence[HashHint], stride: int, least: float) -> int:
        return compiled.leading(self._tables, self._factor, _packed(hints), stride, least)

    def total(self, hints: Iterable[HashHint]) -> int:
        return compiled.total(self._tables, self._factor, _packed(hints))

    def turn(self, *, forget: bool) -> None:
        ended, num_ended = (self._new_table(), 0) if forget else (self._tables[0], self._num_new)
        self._tables, self._num_before = (self._new_table(), ended), num_ended
        self._num_new = 0

    def _new_table(self) -> Table:
        return np.zeros((self._num_slots, 2), np.uint64)  # memory is taken as slots are written to


def _packed(hints: Iterable[HashHint]) -> Sequence[HashHint]:
    return hints if isinstance(hints, memoryview) else array("Q", hints)  # type: ignore[return-value]
