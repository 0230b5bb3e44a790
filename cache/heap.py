"""The Python heap of a process that serves for as long as it lives."""

from __future__ import annotations

import gc


def settle() -> None:
    """What was loaded so far stays as long as the process: keep the garbage collector from looking at it.

    A Router has 160,000 such objects, transformers' and Ray's for the most part, and a replica 450,000: each
    full collection walks them all, some 85 and 240 ms (of a 2-core AMD EPYC) in which no event loop answers
    and no step goes on.
    """
    gc.collect()
    gc.freeze()
