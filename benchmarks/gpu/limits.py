"""What the card itself can do, measured: matrix products a second, bytes a second, free memory.

Knows torch and clocks; knows no network.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.transformers_engines import settle

WARM_UPS, TIMES = 3, 10


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one device and type of number."""

    operations_per_s: float  # of a square matrix product; a multiply-add is two
    bytes_per_s: float  # of a copy on the device, read and written together


def measure(device: torch.device, dtype: torch.dtype, *, matrix: int, copied_bytes: int) -> Limits:
    """Random numbers: a card does products of zeros faster. Takes a second, and frees what it took."""
    left, right = (torch.randn(matrix, matrix, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty(matrix, matrix, device=device, dtype=dtype)
    product_s = seconds(device, lambda: torch.matmul(left, right, out=product))
    source = torch.empty(copied_bytes // dtype.itemsize, device=device, dtype=dtype).normal_()
    target = torch.empty_like(source)
    copy_s = seconds(device, lambda: target.copy_(source))
    return Limits(2.0 * matrix**3 / product_s, 2.0 * source.nbytes / copy_s)


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """The median of several, each timed from an idle device to an idle device."""
    taken = []
    for turn in range(WARM_UPS + TIMES):
        settle(device)
        began_s = time.perf_counter()
        work()
        settle(device)
        if turn >= WARM_UPS:
            taken.append(time.perf_counter() - began_s)
    return median(taken)
