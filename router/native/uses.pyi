"""What `uses.c` is to Python: the tables of `router.placement.use_counts.PackedCounts`.

Raises ValueError where memory is not a table's or not of 64-bit numbers, for a stride below 1 and for as many
entries as there are slots.
"""

from collections.abc import Sequence

from cache.types import HashHint
from router.placement.use_counts import Table

def add(
    table: Table, factor: int, num_entries: int, most: int, hints: Sequence[HashHint], stride: int, /
) -> int: ...
def leading(
    tables: tuple[Table, ...], factor: int, hints: Sequence[HashHint], stride: int, least: float, /
) -> int: ...
def total(tables: tuple[Table, ...], factor: int, hints: Sequence[HashHint], /) -> int: ...
