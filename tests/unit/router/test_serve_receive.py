"""Serve asks its proxy for nothing where the body is here already; the application still hears of it all."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

from ray.serve._private.http_util import ASGIReceiveProxy

from router.serve_receive import fetch_when_lost


def serves_receive(asked: list[object]) -> ASGIReceiveProxy:
    async def ask(request: object) -> bytes:
        asked.append(request)
        return pickle.dumps([{"type": "http.disconnect"}])

    metadata: Any = "request"
    return ASGIReceiveProxy({"type": "http"}, metadata, ask)


async def test_serve_asks_for_nothing_while_the_proxy_lives() -> None:
    asked: list[object] = []
    receive, lost = serves_receive(asked), asyncio.get_running_loop().create_future()
    fetching = asyncio.create_task(receive.fetch_until_disconnect())
    fetch_when_lost(receive, lost)  # as an application does, before the task's first turn
    await asyncio.sleep(0.01)
    assert asked == []
    assert not fetching.done()
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    assert not lost.done()  # others wait for it


async def test_a_proxy_that_is_lost_is_asked_what_has_become_of_the_client() -> None:
    asked: list[object] = []
    receive, lost = serves_receive(asked), asyncio.get_running_loop().create_future()
    fetching = asyncio.create_task(receive.fetch_until_disconnect())
    fetch_when_lost(receive, lost)
    await asyncio.sleep(0.01)
    lost.set_result(None)
    await fetching
    assert asked == ["request"]
    assert await receive() == {"type": "http.disconnect"}


async def test_without_it_serve_asks() -> None:
    asked: list[object] = []
    receive = serves_receive(asked)
    await receive.fetch_until_disconnect()
    assert asked == ["request"]


async def test_another_receive_is_left_alone() -> None:
    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    fetch_when_lost(receive, asyncio.get_running_loop().create_future())
    assert await receive() == {"type": "http.disconnect"}
