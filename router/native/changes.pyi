"""What `changes.c` is to Python: `Segments.mark` and `unmark`, of tables of up to 16 words.

Raises ValueError where memory is not the table's own or not of 64-bit numbers, and for a bit beyond its
words; BufferError where it cannot be written.
"""

from array import array

from router.index.linear_hashing import Slots

MOST_WORDS: int  # of 64 bits each

# Of a table: `LinearHashing.numbers`, what is empty, keys, words, per segment the slots that are used and
# those that are ghosts, and how many entries there are.
All = tuple[
    tuple[int, int, int, int, int, int],
    int,
    memoryview[int],
    tuple[memoryview[int], ...],
    Slots,
    Slots,
    int,
]

def add(
    keys: array[int], bit: int, table: All, max_entries: int, grow_at: int, fill_limit: int, /
) -> tuple[int, int, int, int]:
    """(keys that were looked at, entries there are, keys that had not the bit, their XOR)."""

def discard(keys: array[int], bit: int, table: All, /) -> tuple[int, int, int, int, int]:
    """(entries there are, keys that had the bit, their XOR, those that had not, their XOR)."""
