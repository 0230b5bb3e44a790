"""Triton kernels that are not run: what they are launched with is kept, and tensors may be of any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Launch:
    """One of them."""

    kernel: str
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]  # sizes, flags, warps


class Launches:
    """In the place of a module of kernels: `launches.norm[grid](...)`."""

    def __init__(self) -> None:
        self.made: list[Launch] = []

    def __getattr__(self, kernel: str) -> _Kernel:
        return _Kernel(kernel, self.made)


class _Kernel:
    def __init__(self, name: str, made: list[Launch]) -> None:
        self._name, self._made = name, made

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self._made.append(Launch(self._name, grid, args, options))
