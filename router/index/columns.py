"""Columns of 64-bit numbers in reserved address space: a page takes memory once it is written to.

Growing moves nothing, and what is given back goes back to the system page by page.
Knows rows and columns; knows nothing of what is in them.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.uint64]


class Columns:
    """Columns side by side, each as an array and as a memory view of the same numbers."""

    def __init__(self, count: int, num_columns: int) -> None:
        """count: rows."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._row_bytes = 8 * num_columns
        self._memory = mmap.mmap(-1, self._row_bytes * count, flags=flags)
        # Pages of 2 MiB would make a small table large, and the gauge wrong.
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        numbers: Numbers = np.frombuffer(self._memory, np.uint64)
        view = memoryview(self._memory).cast("Q")
        places = [slice(column, None, num_columns) for column in range(num_columns)]
        self.columns: list[tuple[Numbers, memoryview[int]]] = [(numbers[at], view[at]) for at in places]

    def release(self, first: int, count: int) -> None:
        """Give the memory of these rows back, as far as whole pages go; they must be written anew."""
        start = -(-self._row_bytes * first // mmap.PAGESIZE)
        stop = self._row_bytes * (first + count) // mmap.PAGESIZE
        if start < stop and hasattr(mmap, "MADV_DONTNEED"):
            length = (stop - start) * mmap.PAGESIZE
            self._memory.madvise(mmap.MADV_DONTNEED, start * mmap.PAGESIZE, length)
