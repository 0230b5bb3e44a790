"""The Python heap of a process that serves for as long as it lives."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """For what makes many objects and lets few go, as parsing and importing do: looking for garbage again and
    again while they grow takes long. Not for weights, of which a cycle would keep a copy.

    Of several threads each ends with collections as it found them: who found them on is among these.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def settle() -> None:
    """What was loaded so far stays as long as the process: keep the garbage collector from looking at it.

    A Router has 160,000 such objects, transformers' and Ray's for the most part, and a replica 450,000: each
    full collection walks them all, some 85 and 240 ms (of a 2-core AMD EPYC) in which no event loop answers
    and no step goes on.
    """
    gc.collect()
    gc.freeze()
