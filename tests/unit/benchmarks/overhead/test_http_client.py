"""The client that times answers: what it counts, and what it refuses to count."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from benchmarks.overhead.http_client import BadAnswer, HttpConnection, body_of
from benchmarks.overhead.load import closed_loop
from benchmarks.overhead.samples import Sample

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = b'data: {"a":1}\n\n', b'data: {"b":"2"}\n\n', b'data: {"usage":{}}\n\ndata: [DONE]\n\n'
ANSWER = HEAD + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in EVENTS) + b"0\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(answer: bytes, size: int, *, then_close: bool = False) -> AsyncIterator[int]:
    """A port where every request gets these bytes, so many at a time."""

    clients: list[asyncio.Task[None] | None] = []

    async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
                for at in range(0, len(answer), size):
                    writer.write(answer[at : at + size])
                    await writer.drain()
                    await asyncio.sleep(0)
                if then_close:
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(answer_all, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
    await asyncio.gather(*(client for client in clients if client is not None))


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
async def test_events_are_counted_however_they_arrive(size: int) -> None:
    async with serving(ANSWER, size) as port:
        connection = await HttpConnection.open("127.0.0.1", port)
        samples = [await connection.ask("/path", b"{}") for _ in range(3)]
        connection.close()
    assert [sample.num_pieces for sample in samples] == [2, 2, 2]
    assert all(sample.first_s > 0 for sample in samples)


@pytest.mark.parametrize(
    ("answer", "then_close"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}", False),
        (ANSWER.replace(b"data: [DONE]", b"data: [NONE]"), False),
        (ANSWER[:-20], True),  # cut
    ],
)
async def test_only_whole_streams_count(answer: bytes, then_close: bool) -> None:
    async with serving(answer, 10_000, then_close=then_close) as port:
        connection = await HttpConnection.open("127.0.0.1", port)
        with pytest.raises(BadAnswer):
            await connection.ask("/path", b"{}")
        connection.close()


def test_chunks_are_put_together() -> None:
    assert body_of(ANSWER) == b"".join(EVENTS)
    with pytest.raises(BadAnswer, match="not chunked"):
        body_of(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
    with pytest.raises(BadAnswer, match="inside a chunk"):
        body_of(ANSWER[:-5])


async def test_a_closed_loop_asks_everything_once_with_so_many_at_a_time() -> None:
    asked: list[int] = []
    at_once = [0, 0]  # now, at most

    async def ask(question: int) -> Sample:
        at_once[0] += 1
        at_once[1] = max(at_once)
        await asyncio.sleep(0)
        at_once[0] -= 1
        asked.append(question)
        return Sample(0.0, question)

    samples, wall_s = await closed_loop([ask] * 3, range(10))
    assert sorted(asked) == sorted(sample.num_pieces for sample in samples) == list(range(10))
    assert at_once == [0, 3]
    assert wall_s > 0


async def test_the_first_failure_ends_the_loop() -> None:
    async def ask(question: int) -> Sample:
        if question == 3:
            raise BadAnswer("no")
        await asyncio.sleep(0)
        return Sample(0.0, question)

    with pytest.raises(BadAnswer, match="no"):
        await closed_loop([ask] * 2, range(1000))
