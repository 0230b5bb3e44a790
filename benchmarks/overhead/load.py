"""A closed loop: so many requests, so many of them at a time. Knows no transport."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from benchmarks.overhead.samples import Sample

Asked = TypeVar("Asked")


async def closed_loop(
    askers: Sequence[Callable[[Asked], Awaitable[Sample]]], questions: Sequence[Asked]
) -> tuple[list[Sample], float]:
    """Everybody asks one question after the other until none is left: the samples, and seconds in all.

    Raises what an asker raises, once the others have ended.
    """
    left = iter(questions)
    samples: list[Sample] = []

    async def work(ask: Callable[[Asked], Awaitable[Sample]]) -> None:
        for question in left:  # one iterator for all: whoever is free takes the next
            sample = await ask(question)
            samples.append(sample)

    began_s = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for ask in askers:
                group.create_task(work(ask))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None  # the first one ended the others
    return samples, time.perf_counter() - began_s
