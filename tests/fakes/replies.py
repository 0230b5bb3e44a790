"""Serve's handle to one replica in this process: what `HandleCalls` asks of it, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from ray.serve.exceptions import RequestCancelledError

from cache.messages import Delta
from replica.server import ReplicaServer


class LocalResponse:
    """A streaming call's answer. The replica generates on a task of its own, as fast as items are read."""

    def __init__(self, generator: AsyncGenerator[Delta, None]) -> None:
        self._items: asyncio.Queue[Delta | BaseException] = asyncio.Queue(1)
        self.num_items = 0
        self.task = asyncio.create_task(self._pump(generator))

    def __aiter__(self) -> LocalResponse:
        return self

    async def __anext__(self) -> Delta:
        item = await self._items.get()
        if isinstance(item, BaseException):
            raise item
        self.num_items += 1
        return item

    def cancel(self) -> None:
        self.task.cancel()

    async def _pump(self, generator: AsyncGenerator[Delta, None]) -> None:
        try:
            async for delta in generator:
                await self._items.put(delta)
        except asyncio.CancelledError:
            await generator.aclose()
            self._items.put_nowait(RequestCancelledError("r"))
        except Exception as error:
            await self._items.put(error)
        else:
            await self._items.put(StopAsyncIteration())


class LocalHandle:
    """Passed where a `DeploymentHandle` is wanted."""

    def __init__(self, server: ReplicaServer) -> None:
        self._server = server
        self.responses: list[LocalResponse] = []

    def options(self, **_options: Any) -> LocalHandle:
        return self

    def remote(self, *args: Any) -> LocalResponse:
        self.responses.append(LocalResponse(self._server.generate(*args)))
        return self.responses[-1]
