"""Blocks' keys and values in host memory: a row per slot, with every layer's K and V of one block.

    pages, per layer        staging, device memory       rows, host memory (pinned beside a card)
    keys[block]    --gather-->  [ k0 v0 k1 v1 .. ]  --copy-->  rows[slot]        and back

On a card rows are copied on a stream of their own: saves run beside the forward that follows, which waits for
loads alone. The staging buffers are all the device memory it takes, and are taken when the engine starts.
Knows pages, slots and bytes; knows neither hashes nor who asks (`cache/host_tier.py`).
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from cache.host_tier import BlockMoves
from replica.attention.kv_pages import KVPages
from replica.scheduling.runner import CopyTime
from replica.transfer import to_device

_cuda: Any = torch.cuda  # whose streams and events have no annotations

STAGING_BYTES = 32 << 20  # of each of two buffers: a row of an 8-billion-parameter model's blocks is 2 MiB
# Of rows in one allocation. Torch rounds whatever is to be page-locked up to a power of two: of 20 GiB in one
# piece that is 32, more than was looked for, and in a container the end of the process.
LARGEST_PIECE = 1 << 30


class HostPages:
    """Owns the rows. Engine thread only."""

    def __init__(
        self, pages: KVPages, num_slots: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Raises what the allocator raises when they do not fit."""
        self._tensors = [tensor for layer in pages.layers() for tensor in (layer.keys, layer.values)]
        widths = [tensor[0].numel() for tensor in self._tensors]
        first = self._tensors[0]
        self._device, self._clock = first.device, clock
        is_cuda = self._device.type == "cuda"
        width, row_bytes = sum(widths), sum(widths) * first.element_size()
        sizes = piece_sizes(num_slots, row_bytes)
        self._firsts = [0, *itertools.accumulate(sizes)]  # the slot that each piece begins with
        self._rows = [torch.empty(size, width, dtype=first.dtype, pin_memory=is_cuda) for size in sizes]
        ends = list(itertools.accumulate(widths))
        self._columns = [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]
        rows = max(1, min(num_slots, STAGING_BYTES // row_bytes))
        self._out, self._in = (first.new_empty(rows, width) for _ in range(2))
        self._stream = _cuda.Stream(self._device) if is_cuda else None
        self._timing: deque[tuple[bool, int, Any, Any]] = deque()

    def copy(self, moves: BlockMoves) -> list[CopyTime]:
        """Make these copies, before the next forward; on a card they may run on. What is known of how long
        copies took, on a card those of earlier calls."""
        with torch.inference_mode():
            times = [self._timed(False, moves.saves, self._save), self._timed(True, moves.loads, self._load)]
        return [each for each in times if each is not None] + self._finished()

    def close(self) -> None:
        """Give the memory back, when what runs is over."""
        if self._stream is not None:
            self._stream.synchronize()
        self._timing.clear()
        self._tensors = []
        self._rows = []
        self._out = self._in = torch.empty(0)

    # -- parts ------------------------------------------------------------------------------------

    def _save(self, saves: Sequence[tuple[int, int]]) -> None:
        for blocks, slots in self._pieces(saves):
            self._wait_for_copies()  # they may still read the buffer
            index = to_device(np.array(blocks, dtype=np.int64), self._device)
            staged = self._out[: len(blocks)]
            for tensor, columns in zip(self._tensors, self._columns, strict=True):
                staged[:, columns] = tensor.index_select(0, index).view(len(blocks), -1)
            self._copy_rows([(self._row(slot), staged[row]) for row, slot in enumerate(slots)])

    def _load(self, loads: Sequence[tuple[int, int]]) -> None:
        for slots, blocks in self._pieces(loads):
            staged = self._in[: len(slots)]
            self._copy_rows([(staged[row], self._row(slot)) for row, slot in enumerate(slots)])
            self._wait_for_copies()
            index = to_device(np.array(blocks, dtype=np.int64), self._device)
            for tensor, columns in zip(self._tensors, self._columns, strict=True):
                part = staged[:, columns]
                tensor.index_copy_(0, index, part.reshape(len(blocks), *tensor.shape[1:]))

    def _row(self, slot: int) -> torch.Tensor:
        piece = bisect_right(self._firsts, slot) - 1
        return self._rows[piece][slot - self._firsts[piece]]

    def _pieces(self, moves: Sequence[tuple[int, int]]) -> Iterator[tuple[list[int], list[int]]]:
        size = len(self._out)
        for start in range(0, len(moves), size):
            piece = moves[start : start + size]
            yield [source for source, _ in piece], [target for _, target in piece]

    def _copy_rows(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """(to, from) each. On a card behind all that has been queued until now, and beside what comes."""
        if self._stream is None:
            for target, source in copies:
                target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)

    def _wait_for_copies(self) -> None:
        """Let what is queued from now on wait for the rows that are being copied; the CPU does not."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _timed(
        self,
        is_load: bool,
        moves: Sequence[tuple[int, int]],
        copy: Callable[[Sequence[tuple[int, int]]], None],
    ) -> CopyTime | None:
        if not moves:
            return None
        if self._stream is None:
            began_s = self._clock()
            copy(moves)
            return CopyTime(is_load, len(moves), self._clock() - began_s)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # else its time counts as ours
        began, ended = (_cuda.Event(enable_timing=True) for _ in range(2))
        began.record(self._stream)
        copy(moves)
        ended.record(self._stream)
        self._timing.append((is_load, len(moves), began, ended))
        return None

    def _finished(self) -> list[CopyTime]:
        """Of the copies on a card, those that are over."""
        found = []
        while self._timing and self._timing[0][3].query():
            is_load, num_blocks, began, ended = self._timing.popleft()
            found.append(CopyTime(is_load, num_blocks, began.elapsed_time(ended) / 1000))
        return found


def piece_sizes(num_rows: int, row_bytes: int) -> list[int]:
    """Rows of each allocation: as many as a power of two holds, the largest ones first."""
    sizes = []
    while num_rows:
        power = 1 << (num_rows * row_bytes).bit_length() - 1
        sizes.append(max(1, min(power, LARGEST_PIECE) // row_bytes))
        num_rows -= sizes[-1]
    return sizes
