"""One question to all other Routers, again and again, by whoever wants to know.

Those who ask at the same time share a round, but nobody joins one that has begun: what was answered to it may
be older than what this client has just seen elsewhere. So there are two at most, however many ask.
Knows neither the question nor who is asked. Owner: the router's event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

_Answer = TypeVar("_Answer")


class Rounds(Generic[_Answer]):
    """`aclose` once done."""

    def __init__(self, ask: Callable[[], Awaitable[_Answer]], name: str) -> None:
        """ask: everybody, once. name: of its tasks."""
        self._ask = ask
        self._name = name
        self._under_way: asyncio.Task[_Answer] | None = None
        self._next: asyncio.Task[_Answer] | None = None

    async def next(self) -> _Answer:
        """What all say to a round that begins now, or after the one under way. Raises what `ask` does."""
        if self._next is None:
            # In a context of its own: Serve takes calls made in one request's context for parts of it.
            self._next = asyncio.create_task(
                self._round(self._under_way), name=self._name, context=contextvars.Context()
            )
        return await asyncio.shield(self._next)

    async def aclose(self) -> None:
        """Idempotent."""
        tasks = [task for task in (self._under_way, self._next) if task is not None]
        self._under_way = self._next = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _round(self, before: asyncio.Task[_Answer] | None) -> _Answer:
        if before is not None:
            await asyncio.wait([before])
        self._under_way, self._next = self._next, None
        return await self._ask()
