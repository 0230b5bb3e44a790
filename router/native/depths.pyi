"""What `depths.c` is to Python: `router.index.packed_table.PackedTable.depths`, of members 0 to 63.

Raises ValueError where memory is not of 64-bit numbers. Guesses beyond the first seven are not tried.
"""

def depths(
    chain: memoryview[int],
    members: int,
    guesses: tuple[int, ...],
    hashing: tuple[int, int, int, int, int, int],
    empty: int,
    keys: memoryview[int],
    words: memoryview[int],
    /,
) -> list[tuple[int, int]]: ...
