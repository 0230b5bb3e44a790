"""What is asked over real connections: closed ones, silent ones, and none to be had."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from loadtest.client.answer import Answer, Failure
from loadtest.client.asking import Asker, AsyncAsker
from loadtest.client.attempt import failure_of
from loadtest.client.endpoint import Endpoint
from loadtest.client.question import completion

ROOT = Path(__file__).parents[4]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}
QUESTION = completion("x", max_tokens=1)

Ask = Callable[[], Awaitable[Answer]]
# Of one connection, the number of each question on it.
Serve = Callable[[asyncio.StreamWriter, int], Awaitable[None]]


def chunked(content: str) -> bytes:
    return f"{len(content):x}\r\n{content}\r\n".encode()


async def answer(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunked(f"data: {json.dumps(CHUNK)}\n\ndata: [DONE]\n\n") + chunked(""))
    await writer.drain()


@contextlib.asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[Endpoint]:
    """Questions (POST) are served, each other request is refused."""
    served: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        served.add(task)
        try:
            await questions(reader, writer)
        finally:
            writer.close()

    async def questions(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = 0
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"POST"):
                    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                    continue
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length))
                number += 1
                await serve(writer, number)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "tiny")
    finally:
        server.close()
        for task in served:
            task.cancel()
        await asyncio.gather(*served, return_exceptions=True)


@contextlib.asynccontextmanager
async def asking(kind: str, endpoint: Endpoint, timeout_s: float = 60.0) -> AsyncIterator[Ask]:
    if kind == "async":
        async with AsyncAsker(endpoint, timeout_s) as asker:
            yield lambda: asker.ask(QUESTION)
    else:
        with contextlib.closing(Asker(endpoint, timeout_s)) as blocking:
            yield lambda: asyncio.to_thread(blocking.ask, QUESTION)


KINDS = pytest.mark.parametrize("kind", ["blocking", "async"])


@KINDS
async def test_a_question_that_meets_a_closed_connection_is_asked_again(kind: str) -> None:
    """The server closes each connection when a second question comes over it, before any byte."""
    numbers: list[int] = []

    async def serve(writer: asyncio.StreamWriter, number: int) -> None:
        numbers.append(number)
        if number == 1:
            await answer(writer)
        else:
            writer.close()

    async with serving(serve) as endpoint, asking(kind, endpoint) as ask:
        answers = [await ask() for _ in range(3)]
    assert [each.failure for each in answers] == [None] * 3, answers
    assert numbers == [1, 2, 1, 2, 1]


@KINDS
async def test_a_server_that_closes_new_connections_too_is_asked_once(kind: str) -> None:
    numbers: list[int] = []

    async def serve(writer: asyncio.StreamWriter, number: int) -> None:
        numbers.append(number)
        writer.close()

    async with serving(serve) as endpoint, asking(kind, endpoint) as ask:
        met = [await ask(), await ask()]
    assert [each.failure for each in met] == [Failure.CUT, Failure.CUT]
    # One of three over the connection on which the client has looked around before.
    assert len(numbers) == {"blocking": 2, "async": 3}[kind]


@KINDS
async def test_an_answer_that_has_begun_is_not_asked_for_again(kind: str) -> None:
    asked = 0

    async def serve(writer: asyncio.StreamWriter, number: int) -> None:
        nonlocal asked
        asked += 1
        if number == 1:
            await answer(writer)
        else:
            writer.write(HEAD)
            writer.close()

    async with serving(serve) as endpoint, asking(kind, endpoint) as ask:
        whole = await ask()
        cut = await ask()
    assert (whole.failure, cut.failure, asked) == (None, Failure.CUT, 2)


@KINDS
async def test_comments_keep_no_answer_alive(kind: str) -> None:
    """`: keep-alive` for ever, and `--timeout` never came."""

    async def serve(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(HEAD)
        while not writer.is_closing():
            writer.write(chunked(": keep-alive\n\n"))
            await writer.drain()
            await asyncio.sleep(0.01)

    async with serving(serve) as endpoint, asking(kind, endpoint, timeout_s=0.2) as ask:
        met = await asyncio.wait_for(ask(), 60)
    assert (met.failure, met.problem) == (Failure.TIMEOUT, "nothing of the answer for 0.2 s")


# In a process of its own: it takes all the files it may have.
SCRIPT = """
import asyncio, contextlib, os, resource, socket, sys
from loadtest.client.asking import Asker, AsyncAsker
from loadtest.client.endpoint import Endpoint
from loadtest.client.question import completion

async def main():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    endpoint = Endpoint(f"http://{sys.argv[1]}:{server.sockets[0].getsockname()[1]}", "tiny")
    blocking = Asker(endpoint)
    await asyncio.to_thread(blocking.ask, completion("x", max_tokens=1))
    async with AsyncAsker(endpoint) as asker:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        with contextlib.suppress(OSError):
            while True:
                os.open(os.devnull, os.O_RDONLY)
        print((await asker.ask(completion("x", max_tokens=1))).failure.name)
        print(blocking.ask(completion("x", max_tokens=1)).failure.name)
    os._exit(0)

asyncio.run(main())
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_client_without_files_does_not_blame_the_server(host: str) -> None:
    """A name cannot even be looked up then, and is told to be unknown."""
    command = [sys.executable, "-u", "-c", SCRIPT, host]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.stdout == "NO_FILES\nNO_FILES\n", ended.stderr


@pytest.mark.parametrize(
    "cause", [socket.gaierror(-2, "Name or service not known"), OSError(errno.EBUSY, "as mDNS has it")]
)
def test_a_host_that_is_not_there_is_no_lack_of_files(cause: OSError) -> None:
    error = httpx.ConnectError("unknown")
    error.__cause__ = cause
    assert failure_of(error) is Failure.UNREACHABLE
    assert failure_of(httpx.ConnectError("refused")) is Failure.UNREACHABLE
