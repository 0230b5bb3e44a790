"""A request cancelled behind each single callback of the event loop that it takes: nothing of it stays."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cache.errors import HandedOver, QueueFull
from cache.events import Load
from cache.messages import Delta, GenerateRequest
from cache.types import ReplicaId
from router.errors import ReplicaLost
from tests.fakes.books import Ends, num_ended, open_books
from tests.fakes.callbacks import Callbacks
from tests.fakes.generations import count_several, failing, first_only
from tests.fakes.guarded import key, settings
from tests.fakes.http import MODEL, RouterUnderTest, Script, asgi_call, counting

PATH = "/v1/completions"


@dataclass(frozen=True)
class Kind:
    """Of request."""

    fields: dict[str, Any]
    script: Script = counting  # of whoever is asked first; the others count
    headers: dict[str, str] = field(default_factory=dict)
    is_held: bool = False  # at the Router, until a replica is free
    binding: str = "late"


STREAM = {"stream": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
KINDS = {
    "whole": Kind({}),
    "streamed": Kind(STREAM),
    "a batch": Kind({**STREAM, "prompt": ["a prompt of several blocks", "b"]}, headers=key("bob")),
    "several answers": Kind({**STREAM, "n": 2}, count_several),
    "structured": Kind({"guided_json": SCHEMA}),
    "with a deadline": Kind(STREAM, headers={"x-warmpath-timeout": "60"}),
    "lost": Kind(STREAM, failing(ReplicaLost("gone"), 1)),
    "lost, at once": Kind(STREAM, failing(ReplicaLost("gone"), 1), binding="at_once"),
    "handed over": Kind({}, failing(HandedOver(), 1)),
    "refused": Kind({}, failing(QueueFull(1, 1)), headers=key("bob")),
    "held": Kind(STREAM, is_held=True),
    "a batch that is held": Kind({**STREAM, "prompt": ["a", "b"]}, is_held=True),
}


def unhurried(script: Script) -> Script:
    """The loop runs others before and after each of its steps."""

    async def paused(request: GenerateRequest, replica_id: ReplicaId) -> AsyncGenerator[Delta, None]:
        await asyncio.sleep(0)
        async with aclosing(script(request, replica_id)) as deltas:
            async for delta in deltas:
                yield delta
                await asyncio.sleep(0)

    return paused


def be_busy(router: RouterUnderTest, *, is_busy: bool) -> None:
    """All replicas say so."""
    for replica_id in router.replicas:
        router.parts.routing.on_load(replica_id, Load(num_waiting=10**6 if is_busy else 0))


async def be_free_soon(router: RouterUnderTest) -> None:
    for _ in range(8):
        await asyncio.sleep(0)
    be_busy(router, is_busy=False)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
async def test_whenever_a_request_is_cancelled_nothing_of_it_stays(kind: Kind, tmp_path: Path) -> None:
    config: dict[str, Any] = {"tenants": settings(tmp_path)} if "authorization" in kind.headers else {}
    async with RouterUnderTest(num_replicas=3, max_attempts=4, binding=kind.binding, **config) as router:
        first_only(router, unhurried(kind.script))
        ends, callbacks = Ends(), Callbacks()
        router.parts.routing.watch(ends)
        body = {"model": MODEL, "prompt": "a prompt of several blocks", "max_tokens": 5, **kind.fields}

        def ask() -> asyncio.Task[Any]:
            call = asgi_call(router.api, PATH, body, asyncio.Event(), headers=kind.headers)
            return asyncio.create_task(call)

        await ask()  # what a thread finds out once, of a structure for instance, is known from now on
        for number in itertools.count(1):
            await asyncio.sleep(0)  # what is left to be done of the one before
            be_busy(router, is_busy=kind.is_held)
            asked = ask()
            freeing = asyncio.create_task(be_free_soon(router)) if kind.is_held else None
            was_over = await _cancelled_behind(callbacks, number, asked)
            if freeing is not None:
                await freeing
            assert open_books(router) == {}, number
            assert num_ended(router) == 1 + number, number
            assert set(ends.of.values()) <= {1}, number
            if was_over:
                break
            assert asked.cancelled(), number
        assert number > 10


async def _cancelled_behind(callbacks: Callbacks, number: int, asked: asyncio.Task[Any]) -> bool:
    """Whether it was over before."""
    was_over: list[bool] = []

    def cancel() -> None:
        was_over.append(asked.done())
        asked.cancel()

    callbacks.after(number, cancel)
    await asyncio.wait([asked], timeout=60)
    assert asked.done()
    return was_over != [False]
