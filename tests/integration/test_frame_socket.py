"""A subscribing socket on the event loop, over real sockets: nothing is left behind, nothing stops it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from zmq.asyncio import Context
from zmq.constants import LAST_ENDPOINT, PUB
from zmq.sugar.context import Context as PlainContext

from router.events.frame_socket import MESSAGES_PER_TURN, PAUSE_S, FrameSocket
from tests.fakes.router import replica_id

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Serve runs Routers on uvloop."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


@pytest.fixture
def sender() -> Iterator[Any]:
    context: Any = PlainContext()
    socket = context.socket(PUB)
    socket.bind("tcp://127.0.0.1:*")
    yield socket
    context.destroy(linger=0)


@asynccontextmanager
async def listening(sender: Any, on_frames: Callable[[list[bytes]], None]) -> AsyncIterator[FrameSocket]:
    """To what begins with `kv`, from when the sender is known to be heard."""
    context, heard, greeted = Context(), asyncio.Event(), False

    def on_message(frames: list[bytes]) -> None:
        if frames == [b"kv", b"hello"]:
            heard.set()
        else:
            assert greeted
            on_frames(frames)

    endpoint = sender.getsockopt_string(LAST_ENDPOINT)
    socket = FrameSocket(context, endpoint, [b"kv"], on_message, replica_id=replica_id(0), options={})
    try:
        async with asyncio.timeout(10):
            while not heard.is_set():
                sender.send_multipart([b"kv", b"hello"])
                await asyncio.sleep(0.01)
        greeted = True
        yield socket
    finally:
        socket.close()
        context.destroy(linger=0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  what is waited for is counted by what is tested
            await asyncio.sleep(0.005)


def test_every_message_comes_once_in_order(run: Run, sender: Any) -> None:
    async def story() -> None:
        got: list[list[bytes]] = []
        async with listening(sender, got.append):
            sent = []
            for number in range(50):  # each on its own: the descriptor has to tell of every one
                sent.append([b"kv", b"%d" % number])
                sender.send_multipart([b"other", b"not for us"])
                sender.send_multipart(sent[-1])
                await until(lambda: len(got) == len(sent))
            assert got == sent

    run(story())


def test_a_flood_leaves_the_loop_its_turns(run: Run, sender: Any) -> None:
    async def story() -> None:
        got: list[int] = []
        turns: list[int] = []

        async def others() -> None:
            while True:
                turns.append(len(got))
                await asyncio.sleep(0)

        count = 10 * MESSAGES_PER_TURN  # as many as zmq keeps for a slow reader, by default
        async with listening(sender, lambda frames: got.append(int(frames[1]))):
            beside = asyncio.create_task(others())
            for number in range(count):
                sender.send_multipart([b"kv", b"%d" % number])
            await until(lambda: len(got) == count)
            beside.cancel()
        assert got == list(range(count))
        assert max(after - before for before, after in itertools.pairwise(turns)) <= MESSAGES_PER_TURN

    run(story())


def test_a_message_that_fails_costs_itself_alone(
    run: Run, sender: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        got: list[bytes] = []

        def take(frames: list[bytes]) -> None:
            if frames[1] == b"bad":
                raise ValueError("a bug")
            got.append(frames[1])

        async with listening(sender, take):
            with caplog.at_level(logging.ERROR):
                for content in (b"one", b"bad", b"two"):
                    sender.send_multipart([b"kv", content])
                await until(lambda: got == [b"one", b"two"])
            sender.send_multipart([b"kv", b"three"])
            await until(lambda: got == [b"one", b"two", b"three"])
        [record] = caplog.records
        assert (record.getMessage(), record.__dict__["replica_id"]) == ("event failed", replica_id(0))

    run(story())


def test_it_may_be_closed_while_it_reads(run: Run, sender: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        got: list[bytes] = []

        def take(frames: list[bytes]) -> None:
            got.append(frames[1])
            socket.close()

        async with listening(sender, take) as socket:
            for content in (b"one", b"two"):
                sender.send_multipart([b"kv", content])
            await until(lambda: bool(got))
            await asyncio.sleep(0.05)
            socket.close()
        assert got == [b"one"]
        assert not caplog.records

    run(story())


def test_whoever_closes_it_may_fail_then(run: Run, sender: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A closed socket is not taken up again once the pause after a failure is over."""

    async def story() -> None:
        got: list[bytes] = []

        def take(frames: list[bytes]) -> None:
            got.append(frames[1])
            socket.close()
            raise ValueError("a bug")

        async with listening(sender, take) as socket:
            sender.send_multipart([b"kv", b"one"])
            await until(lambda: bool(got))
            await asyncio.sleep(2 * PAUSE_S)
        assert [record.getMessage() for record in caplog.records] == ["event failed"]

    run(story())
