"""What `changes.c` is to Python: `Segments.mark` and `unmark`, of tables of up to 16 words.

Raises ValueError where memory is not the table's own or not of 64-bit numbers, and for a bit beyond its
words; BufferError where it cannot be written.
"""

from array import array

from router.index.linear_hashing import Slots

MOST_WORDS: int  # of 64 bits each

def add(
    keys: array[int],
    bit: int,
    hashing: tuple[int, int, int, int, int, int],
    empty: int,
    slots: memoryview[int],
    words: tuple[memoryview[int], ...],
    used: Slots,
    ghosts: Slots,
    num_entries: int,
    max_entries: int,
    grow_at: int,
    fill_limit: int,
    /,
) -> tuple[int, int, int, int]:
    """(keys that were looked at, entries there are, keys that had not the bit, their XOR)."""

def discard(
    keys: array[int],
    bit: int,
    hashing: tuple[int, int, int, int, int, int],
    empty: int,
    slots: memoryview[int],
    words: tuple[memoryview[int], ...],
    used: Slots,
    ghosts: Slots,
    num_entries: int,
    /,
) -> tuple[int, int, int, int, int]:
    """(entries there are, keys that had the bit, their XOR, those that had not, their XOR)."""
