"""Clients that go away: whatever was generated for them stops."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from cache.messages import Delta
from tests.fakes.http import MODEL, RouterUnderTest, asgi_call, text_of


async def _until_hanging(router: RouterUnderTest, num_calls: int) -> None:
    """Enough turns of the loop for so many calls to start and for their deltas to be passed on."""
    for _ in range(200):
        await asyncio.sleep(0)
    assert router.calls.running == num_calls


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_deltas", [0, 1])
async def test_a_client_that_leaves_cancels_its_generations(
    router: RouterUnderTest, stream: bool, num_deltas: int, prompt: Any
) -> None:
    """Waiting for the first token, or after it; whole or streamed; alone or a batch."""
    router.answer_with(*[Delta(text_of(0), (1,), 0)] * num_deltas, then_hang=True)
    disconnect = asyncio.Event()
    body = {"model": MODEL, "prompt": prompt, "stream": stream}
    call = asyncio.create_task(asgi_call(router.api, "/v1/completions", body, disconnect))
    num_prompts = 1 if isinstance(prompt, str) else len(prompt)
    await _until_hanging(router, num_prompts)
    disconnect.set()
    await asyncio.wait_for(call, 20)
    assert router.calls.running == 0
    assert router.calls.cancelled == num_prompts
    assert router.parts.routing.statistics().in_flight == 0
    assert router.metric("warmpath_requests_total", endpoint="completions", outcome="cancelled") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_handler_that_is_cancelled_cancels_its_generation(
    router: RouterUnderTest, stream: bool
) -> None:
    """What Serve does when a client leaves, besides telling us."""
    router.answer_with(Delta(text_of(0), (1,), 0), then_hang=True)
    body = {"model": MODEL, "prompt": "x", "stream": stream}
    call = asyncio.create_task(asgi_call(router.api, "/v1/completions", body, asyncio.Event()))
    await _until_hanging(router, 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (router.calls.running, router.calls.cancelled) == (0, 1)
    assert router.metric("warmpath_requests_total", endpoint="completions", outcome="cancelled") == 1


async def test_a_client_that_leaves_what_it_was_sent_unread_leaves_no_error(router: RouterUnderTest) -> None:
    """Nothing of its answer is left to the garbage collector, which would close it beside us."""
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: complaints.append(context))
    router.answer_with(Delta(text_of(0), (1,), 0), then_hang=True)
    disconnect = asyncio.Event()
    body = {"model": MODEL, "prompt": ["x", "y"], "stream": True}
    call = asyncio.create_task(asgi_call(router.api, "/v1/completions", body, disconnect, reads=False))
    await _until_hanging(router, 2)
    disconnect.set()
    await asyncio.wait_for(call, 20)
    for _ in range(200):
        gc.collect(0)
        await asyncio.sleep(0)
    assert (router.calls.running, router.calls.cancelled) == (0, 2)
    assert complaints == []


@pytest.mark.parametrize("is_told", [True, False])
async def test_whenever_it_is_cancelled_nothing_goes_on(router: RouterUnderTest, is_told: bool) -> None:
    """In every turn of the loop from its first on: also when the first token has just come.

    is_told: the server tells of the disconnect; else it cancels the handler.
    """
    router.answer_with(Delta(text_of(0), (1,), 0), then_hang=True)
    body = {"model": MODEL, "prompt": "x", "stream": True}
    for turns in range(60):
        disconnect = asyncio.Event()
        call = asyncio.create_task(asgi_call(router.api, "/v1/completions", body, disconnect))
        for _ in range(turns):
            await asyncio.sleep(0)
        if is_told:
            disconnect.set()
        else:
            call.cancel()
        await asyncio.wait([call], timeout=20)
        assert call.done()
        assert router.calls.running == 0, turns
        assert router.parts.routing.statistics().in_flight == 0, turns


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]], ids=["one", "several"])
@pytest.mark.parametrize("is_told", [True, False])
async def test_whenever_it_is_cancelled_while_it_ends_nothing_goes_on(
    router: RouterUnderTest, is_told: bool, prompt: Any
) -> None:
    """In every turn of the loop from when its client left, or it was cancelled first, on.

    The client takes nothing, so that a sender is waiting then. Nothing is left to the garbage collector.
    """
    router.answer_with(Delta(text_of(0), (1,), 0), then_hang=True)
    body = {"model": MODEL, "prompt": prompt, "stream": True}
    num_calls = 1 if isinstance(prompt, str) else len(prompt)
    for turns in range(20):
        disconnect = asyncio.Event()
        call = asyncio.create_task(asgi_call(router.api, "/v1/completions", body, disconnect, reads=False))
        await _until_hanging(router, num_calls)
        if is_told:
            disconnect.set()
        else:
            call.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call], timeout=20)
        assert call.done()
        assert router.calls.running == 0, turns
        assert router.parts.routing.statistics().in_flight == 0, turns
