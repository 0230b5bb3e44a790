"""The Python heap of a process that serves for as long as it lives."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterator


class _Pauses:
    """Of collections: they come on again with the end of the last, if they were on before the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all of this, and the switch itself
        self._num = 0
        self._were_on = False

    def begin(self) -> None:
        with self._lock:
            if not self._num:
                self._were_on = gc.isenabled()
                gc.disable()
            self._num += 1

    def end(self) -> None:
        with self._lock:
            self._num -= 1
            if not self._num and self._were_on:
                gc.enable()


_pauses = _Pauses()


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """For what makes many objects and lets few go, as parsing and importing do: looking for garbage again and
    again while they grow takes long. Not for weights, of which a cycle would keep a copy.

    Of several threads the last to end leaves collections as the first found them.
    """
    _pauses.begin()
    try:
        yield
    finally:
        _pauses.end()


def settle() -> None:
    """What was loaded so far stays as long as the process: keep the garbage collector from looking at it.

    A Router has 160,000 such objects, transformers' and Ray's for the most part, and a replica 450,000: each
    full collection walks them all, some 85 and 240 ms (of a 2-core AMD EPYC) in which no event loop answers
    and no step goes on.
    """
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Give freed memory to the system: what many small pieces were, glibc keeps while anything lies behind.

    For after work that took hundreds of megabytes; it takes a tenth of a second then.
    """
    if _trim is not None:
        _trim(0)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; elsewhere nothing is held back
