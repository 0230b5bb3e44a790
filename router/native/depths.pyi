"""What `depths.c` is to Python: `router.index.packed_table.PackedTable.depths`, of members 0 to 1,023.

Raises ValueError where memory is not of 64-bit numbers, and for more guesses than it takes.
"""

MOST_WORDS: int  # of 64 members each
MOST_GUESSES: int

def depths(
    chain: memoryview[int],
    members: int,
    guesses: tuple[int, ...],
    hashing: tuple[int, int, int, int, int, int],
    empty: int,
    keys: memoryview[int],
    words: tuple[memoryview[int], ...],
    /,
) -> list[tuple[int, int]]: ...
