"""Threads with room for deep recursion, to compile grammars on.

llguidance compiles by recursion, one level for each rule that names another and for each bracket, and a
stack that overflows ends the process: a grammar of 20 KB did, in which each rule names the next one, and a
schema of `$ref`s likewise. No limit of llguidance's counts those levels. They cost less than 1 KiB of stack
for each byte of source, so `MAX_SOURCE_BYTES` fit here. Only what is used of it becomes memory.
Knows threads; knows no grammars.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

STACK_BYTES = 256 << 20
MAX_SOURCE_BYTES = STACK_BYTES >> 10

P = ParamSpec("P")
T = TypeVar("T")

_STACK_SIZE = threading.Lock()  # it is the process's: set for as long as it takes to start a thread


class DeepThreads(ThreadPoolExecutor):
    """A pool whose threads, started when there is work, have `STACK_BYTES` each."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        with _STACK_SIZE:
            before = threading.stack_size(STACK_BYTES)
            try:
                return super().submit(fn, *args, **kwargs)
            finally:
                threading.stack_size(before)
