"""Memory that is given back to be used again.

Fresh memory comes from the system page by page, as it is first written: what a layer keeps of eight sequences
of 270 to 970 tokens (2 K/V heads of 32, float32) were 420 to 890 faults and 4 to 12 ms of system time, on a
virtual machine whose own memory is not all there yet (2026-11-23); the decode step around it took 5. An
allocator that has freed such a piece has either given it back or no piece of the size that is next asked for.

Knows numbers of elements; knows neither layers nor groups.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import torch

# Of a new piece on a CPU, times what is asked for. What lies beyond costs addresses until it is written; then
# whatever grows step by step lives in the same few pieces, of which each move writes a little more.
REACH = 4

# What is kept for nobody in particular; what is given back beyond it is freed.
MAX_SPARE_BYTES = 64 << 20


class SpareMemory:
    """Tensors of one type on one device. Engine thread only."""

    def __init__(self, max_bytes: int = MAX_SPARE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._spare: list[torch.Tensor] = []  # one axis each; by size
        self.num_bytes = 0  # of them

    def take(self, like: torch.Tensor, count: int, most: int) -> torch.Tensor:
        """One axis of at least `count` elements and at most `most`, with anything in them."""
        place = bisect_left(self._spare, count, key=torch.Tensor.numel)
        if place < len(self._spare) and self._spare[place].numel() <= most:
            memory = self._spare.pop(place)
            self.num_bytes -= memory.nbytes
            return memory
        return like.new_empty(min(count * REACH, most) if like.device.type == "cpu" else count)

    def give_back(self, memory: torch.Tensor) -> None:
        """What `take` gave, whole; nobody uses it any more."""
        if self.num_bytes + memory.nbytes <= self._max_bytes:
            insort(self._spare, memory, key=torch.Tensor.numel)
            self.num_bytes += memory.nbytes
