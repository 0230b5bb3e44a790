"""A replica's deltas reach its Router over a connection of its own or as items of Ray's call: the same ones.

The real replica server over the simulated runner, the Router's real calls and channels; between them TCP on
this machine, and in place of Ray a handle in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from cache.channel import server as channel_server
from cache.channel.frames import CHANNEL_BYTES, FORMAT_VERSION, hello
from cache.channel.reader import PAUSED_PIECES
from cache.delta_frames import piece
from cache.errors import HandedOver, PiecesLost
from cache.messages import Delta, FinishReason, GenerateRequest, ReplicaInfo
from cache.types import ReplicaId
from replica.config import ReplicaConfig, SimConfig
from replica.errors import EngineStopped, InvalidRequest
from replica.server import ReplicaServer
from router.deltas.delta_channels import ChannelSettings, DeltaChannels
from router.ingress import HandleCalls
from tests.fakes.engine import make_request
from tests.fakes.replies import LocalHandle

REPLICA = ReplicaId("r")
CONFIG = ReplicaConfig(
    runner="simulated",
    num_blocks=200,
    stream_interval_s=0.0,  # a piece for every token
    sim=SimConfig(base_s=0.002, per_token_s=0.0),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARMPATH_CACHE", str(tmp_path_factory.mktemp("models")))
        yield


class Line:
    """One replica and one Router."""

    def __init__(self, *, has_channel: bool) -> None:
        self.has_channel = has_channel
        self.server = ReplicaServer(replace(CONFIG, delta_channel=has_channel))
        self.info = ReplicaInfo.from_json(self.server.record_replica_metadata()["warmpath"])
        self.channels = DeltaChannels(ChannelSettings(retry_s=0.01, told_after_s=0.0))
        self.handle = LocalHandle(self.server)
        handle: Any = self.handle
        self.calls = HandleCalls(handle, self.channels)

    async def open(self) -> None:
        self.channels.update({REPLICA: self.info})
        if self.has_channel:
            await until(lambda: self.channels.statistics().open_by_replica.get(REPLICA, False))

    async def close(self) -> None:
        await self.channels.aclose()
        self.server.shutdown()
        await asyncio.sleep(0)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        return self.calls.generate(request)

    @property
    def num_running(self) -> int:
        load = self.server._engine.load()
        return load.num_running + load.num_waiting

    def cut(self) -> None:
        """The network loses the connection."""
        assert self.server._deltas is not None
        for connection in list(self.server._deltas._connections):
            connection._transport.abort()


@pytest.fixture(params=[True, False], ids=["channel", "call"])
async def line(models: None, request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    line = Line(has_channel=request.param)
    await line.open()
    yield line
    await line.close()


@pytest.fixture
async def channel(models: None) -> AsyncIterator[Line]:
    line = Line(has_channel=True)
    await line.open()
    yield line
    await line.close()


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_true():  # noqa: ASYNC110 - what is waited for knows of no event
            await asyncio.sleep(0.005)


async def collect(deltas: AsyncGenerator[Delta, None]) -> list[Delta]:
    return [delta async for delta in deltas]


def tokens(deltas: list[Delta], choice: int = 0) -> list[int]:
    return [token_id for delta in deltas if delta.choice == choice for token_id in delta.token_ids]


def text(deltas: list[Delta], choice: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.choice == choice)


def request_of(name: str, max_tokens: int = 30, **fields: Any) -> GenerateRequest:
    return make_request(name, range(3, 60), max_tokens=max_tokens, seed=7, **fields)


async def test_an_answer_is_what_the_engine_says(line: Line) -> None:
    expected = await collect(line.server._engine.generate(request_of("direct")))
    for name, cached in (("a", 48), ("b", 48)):
        deltas = await collect(line.generate(request_of(name)))
        assert (text(deltas), tokens(deltas)) == (text(expected), tokens(expected))
        assert {delta.cached_tokens for delta in deltas} == {cached}
        assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + [FinishReason.LENGTH]
    told = line.channels.statistics()
    assert (told.by_channel, told.by_call) == ((2, 0) if line.has_channel else (0, 0))
    assert sum(response.num_items > 0 for response in line.handle.responses) == (0 if line.has_channel else 2)


async def test_several_answers_share_a_stream(line: Line) -> None:
    several = replace(request_of("n", temperature=1.0), n=3)
    expected = await collect(line.server._engine.generate(several))
    deltas = await collect(line.generate(replace(several, request_id="m")))
    for choice in range(3):
        assert tokens(deltas, choice) == tokens(expected, choice)
        assert text(deltas, choice) == text(expected, choice)


async def test_what_a_replica_refuses_is_raised(line: Line) -> None:
    with pytest.raises(InvalidRequest):
        await collect(line.generate(make_request("bad", [10**6])))


async def test_streams_at_once_do_not_mix(line: Line) -> None:
    requests = [make_request(f"r{i}", range(i, i + 40), max_tokens=20, seed=i) for i in range(6)]
    expected = [await collect(line.server._engine.generate(request)) for request in requests]
    again = [replace(request, request_id=f"again-{request.request_id}") for request in requests]
    answers = await asyncio.gather(*(collect(line.generate(request)) for request in again))
    assert [tokens(answer) for answer in answers] == [tokens(answer) for answer in expected]


async def test_who_stops_reading_ends_the_generation(line: Line) -> None:
    async with aclosing(line.generate(request_of("r", 2000))) as deltas:
        await anext(deltas)
        assert line.num_running == 1
    await until(lambda: line.num_running == 0)
    assert line.channels._readers == {}


async def test_a_slow_reader_gets_all_and_is_not_sent_more_than_a_few_pieces(line: Line) -> None:
    expected = await collect(line.server._engine.generate(request_of("direct", 200)))
    async with aclosing(line.generate(request_of("r", 200))) as deltas:
        read = [await anext(deltas)]
        await until(lambda: line.num_running == 0)  # computed to the end; nobody has read it
        await asyncio.sleep(0.05)
        waiting = [reader for reader in line.channels._readers.values()]
        assert all(len(reader._unread) <= 2 * PAUSED_PIECES for reader in waiting)
        read += [delta async for delta in deltas]
    assert (text(read), tokens(read)) == (text(expected), tokens(expected))
    assert len(read) <= 3 * PAUSED_PIECES  # the rest came in one


async def test_a_replica_that_leaves_says_so_in_the_middle(line: Line) -> None:
    async with aclosing(line.generate(request_of("r", 2000))) as deltas:
        read = [await anext(deltas)]
        line.server._engine.hand_over()
        with pytest.raises(HandedOver):
            read += [delta async for delta in deltas]
    line.server.shutdown()
    with pytest.raises(EngineStopped):
        await collect(line.generate(request_of("late")))


async def test_a_lost_connection_is_noticed_and_what_is_missing_is_generated_again(channel: Line) -> None:
    """The replica is well, and so it is told: the answer goes on there, by the call until it is connected."""
    expected = await collect(channel.server._engine.generate(request_of("direct", 300)))
    read: list[Delta] = []

    async def read_until_lost() -> None:
        async for delta in channel.generate(request_of("r", 300)):
            read.append(delta)
            if len(read) == 5:
                channel.cut()

    with pytest.raises(PiecesLost):
        await read_until_lost()
    await until(lambda: channel.num_running == 0)
    so_far = tokens(read)
    rest = request_of("s", 300, output=so_far, sent_chars=len(text(read)))
    read += await collect(channel.generate(replace(rest, attempt=1)))
    assert (text(read), tokens(read)) == (text(expected), tokens(expected))
    await until(lambda: channel.channels.statistics().open_by_replica[REPLICA])
    assert channel.channels.statistics().lost == 1


async def test_who_is_not_connected_is_answered_by_the_call_and_counted(channel: Line) -> None:
    """One replica's connection is not another's: a call may reach one without."""
    expected = await collect(channel.generate(request_of("a")))
    assert channel.server._deltas is not None
    channel.server._deltas._by_channel.clear()  # as if this replica had never been greeted
    deltas = await collect(channel.generate(request_of("b")))
    assert tokens(deltas) == tokens(expected)
    told = channel.channels.statistics()
    assert (told.by_channel, told.by_call) == (1, 1)


async def test_a_replica_that_leaves_the_membership_finishes_over_its_connection(channel: Line) -> None:
    read: list[Delta] = []
    async for delta in channel.generate(request_of("r", 100)):
        read.append(delta)
        if len(read) == 3:
            channel.channels.update({})
    assert len(tokens(read)) == 100
    assert channel.channels.statistics().open_by_replica == {}
    channel.cut()
    await until(lambda: not channel.channels._tasks)
    assert channel.channels.statistics().lost == 0


async def test_where_rays_calls_are_encrypted_deltas_come_by_them(
    models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    server = ReplicaServer(CONFIG)
    assert server.describe()["delta_endpoint"] == ""
    assert len(tokens(await collect(server.generate(request_of("r"), None)))) == 30
    server.shutdown()


def test_the_event_loop_that_serve_uses_has_transports_of_its_own(models: None) -> None:
    """uvloop's are no subclass of asyncio's: taken for one, no connection was ever made."""
    uvloop = pytest.importorskip("uvloop")

    async def generate() -> None:
        line = Line(has_channel=True)
        await line.open()
        deltas = await collect(line.generate(request_of("r")))
        assert len(tokens(deltas)) == 30
        assert line.channels.statistics().by_channel == 1
        await line.close()

    uvloop.run(generate())


async def test_logprobs_come_by_the_call(channel: Line) -> None:
    request = request_of("r")
    assert channel.channels.open(replace(request, sampling=replace(request.sampling, logprobs=2))) is None
    asked = replace(request.sampling, prompt_logprobs=1)
    assert channel.channels.open(replace(request, sampling=asked)) is None
    assert channel.channels.statistics().by_call == 0  # for no want of a connection


async def test_without_a_connection_it_is_tried_again_and_told_once(
    channel: Line, caplog: pytest.LogCaptureFixture
) -> None:
    channels = DeltaChannels(ChannelSettings(retry_s=0.001, max_retry_s=0.002, told_after_s=0.0))
    channels.update({REPLICA: replace(channel.info, delta_endpoint="tcp://127.0.0.1:1")})
    await until(lambda: "no connection for deltas" in caplog.text)
    await asyncio.sleep(0.05)
    assert caplog.text.count("no connection for deltas") == 1
    assert channels.statistics().open_by_replica == {REPLICA: False}
    assert channels.open(request_of("r")) is None
    assert channels.statistics().by_call == 1
    await channels.aclose()
    await channels.aclose()
    channels.update({REPLICA: channel.info})  # too late: ignored
    assert not channels._tasks


# -- who else may connect --------------------------------------------------------------------------


async def stranger(line: Line) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = line.info.delta_endpoint.removeprefix("tcp://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 300,
        (1 << 30).to_bytes(4, "little"),
        hello(bytes(CHANNEL_BYTES)).replace(bytes([FORMAT_VERSION]), bytes([FORMAT_VERSION + 1]), 1),
        piece(0, 0, Delta("", (), 0)),
        hello(bytes(CHANNEL_BYTES)) + b"\x03\x00\x00\x00abc",
    ],
    ids=["http", "huge", "version", "piece", "noise after the greeting"],
)
async def test_who_talks_nonsense_is_disconnected(channel: Line, said: bytes) -> None:
    reader, writer = await stranger(channel)
    writer.write(said)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await asyncio.wait_for(reader.readexactly(1 << 16), 10)
    writer.close()
    assert (await collect(channel.generate(request_of("r"))))[-1].finish_reason is FinishReason.LENGTH
    assert channel.channels.statistics().by_channel == 1


async def test_who_names_no_call_hears_nothing(channel: Line) -> None:
    reader, writer = await stranger(channel)
    writer.write(hello(b"\x01" * CHANNEL_BYTES))
    heard = bytearray()

    async def listen() -> None:
        while received := await reader.read(1 << 16):
            heard.extend(received)

    listening = asyncio.create_task(listen())
    await until(lambda: bool(heard))  # the welcome
    welcomed = len(heard)
    await collect(channel.generate(request_of("r")))
    await asyncio.sleep(0.02)
    assert len(heard) == welcomed
    writer.close()
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


async def test_who_says_nothing_is_not_waited_for(channel: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_server, "GREETING_LIMIT_S", 0.01)
    reader, writer = await stranger(channel)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await asyncio.wait_for(reader.readexactly(1), 10)
    writer.close()


async def test_there_is_room_for_so_many_connections(channel: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_server, "MAX_CONNECTIONS", 1)
    reader, writer = await stranger(channel)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await asyncio.wait_for(reader.readexactly(1), 10)
    writer.close()
    assert (await collect(channel.generate(request_of("r"))))[-1].finish_reason is FinishReason.LENGTH


async def test_a_router_that_connects_anew_is_heard_on_its_new_connection(channel: Line) -> None:
    """Its old connection may look well for a while yet, to the replica."""
    name = b"\x02" * CHANNEL_BYTES
    (first_reader, first_writer), (_, second_writer) = await stranger(channel), await stranger(channel)
    first_writer.write(hello(name))
    assert await asyncio.wait_for(first_reader.read(1 << 16), 10)
    second_writer.write(hello(name))
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await asyncio.wait_for(first_reader.readexactly(1), 10)
    first_writer.close()
    second_writer.close()
