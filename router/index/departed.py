"""Members of the index that have left, until nothing of them is in the table and their numbers are free.

    left ──> being swept ──> swept, but perhaps predicted still ──> its number is given out again

A member that leaves matches nobody from that moment, so its entries are in no hurry: they are taken out a few
segments of the table at a time. Knows numbers and the table; knows no replicas. Written by `HashTrie` alone.
"""

from __future__ import annotations

from router.index.members import Members, numbers
from router.index.packed_table import WORD_BITS, PackedTable
from router.index.predictions import Predictions

SWEEP_AT_ONCE, SWEEP_PER_CALL = 16, 4  # segments: when a member leaves, and with each call after that


class Departed:
    """Of one table, and of the predictions beside it."""

    def __init__(self, table: PackedTable, predictions: Predictions, members: Members) -> None:
        self._table, self._predictions, self._members = table, predictions, members
        self._waiting = 0  # for a sweep, as a bit set
        self._sweeping = 0  # the same; segments below the cursor are yet to be visited
        self._cursor = 0
        self._swept: list[int] = []

    @property
    def are_left(self) -> bool:
        """Whether entries of theirs are still to be swept out, or numbers to be given back."""
        return bool(self._waiting or self._sweeping or self._swept)

    def leave(self, members: int) -> None:
        """These have left, as a bit set. O(1), and a few segments."""
        self._waiting |= members
        self.sweep(SWEEP_AT_ONCE)

    def free_a_number(self) -> None:
        """Sweep until somebody's number is free, or nobody's will be. A millisecond or two; rare."""
        while self.are_left and not self._members.has_free:
            self._predictions.let_go()
            self.sweep(SWEEP_AT_ONCE)

    def sweep(self, num_segments: int = SWEEP_PER_CALL) -> None:
        """Take them out of so many segments, from the last one down."""
        if not self._sweeping:
            if not self._waiting:
                if self._swept:
                    self._free_swept()
                return
            self._sweeping, self._waiting = self._waiting, 0
            self._cursor = self._table.num_segments
        # Segments opened since are clean, and what was merged away went below the cursor or was cleaned.
        first = max(0, self._cursor - num_segments)
        self._table.sweep(self._sweeping, first, self._cursor - first)
        self._cursor = first
        if not first:
            self._table.swept()
            self._swept += numbers(self._sweeping)
            self._sweeping = 0
            self._free_swept()

    def _free_swept(self) -> None:
        clear = [member for member in self._swept if self._predictions.is_clear_of(member)]
        self._swept = [member for member in self._swept if member not in clear]
        for member in clear:
            self._members.free(member)
        # A word nobody is numbered in is 8 bytes a slot for nothing.
        while self._table.num_words > 1 and self._members.withdraw(WORD_BITS * (self._table.num_words - 1)):
            self._table.drop_word()
