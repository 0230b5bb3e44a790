"""An answer reaches the client through Serve's Python proxy as the Router gave it, whichever way it takes.

The middlewares of proxy and Router with TCP on this machine between them, and in place of Serve a stand-in
in this process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.serve._private.http_util import RequestIdMiddleware
from starlette.types import Message, Receive, Scope, Send

from cache.channel.reader import PAUSED_PIECES
from cache.errors import PiecesLost
from deploy import proxy_bodies, router_connections
from deploy.http_errors import OneErrorShape
from deploy.proxy_bodies import BodiesFromRouters
from router.errors import AnswerNotTaken
from tests.fakes.proxied import PATH, Api, Client, answered, body, connect, until
from tests.fakes.serve_call import ProxyAndRouter


@pytest.fixture
async def api() -> Api:
    return Api()


@pytest.fixture(params=["channel", "call", "Router without"])
async def line(request: pytest.FixtureRequest, api: Api) -> AsyncIterator[ProxyAndRouter]:
    line = ProxyAndRouter(api, has_channel=request.param != "Router without")
    if request.param == "channel":
        await connect(line)
    yield line
    await line.close()


@pytest.fixture
async def channel(api: Api) -> AsyncIterator[ProxyAndRouter]:
    line = ProxyAndRouter(api)
    await connect(line)
    yield line
    await line.close()


async def test_an_answer_is_the_routers(line: ProxyAndRouter, api: Api) -> None:
    client = await answered(line, b'{"prompt": "x"}')
    assert api.bodies[-1] == b'{"prompt": "x"}'
    assert client.messages[0]["type"] == "http.response.start"
    assert (client.messages[0]["status"], client.content) == (200, b"".join(api.parts))
    assert client.is_whole
    assert client.headers()[b"x-warmpath-replica"] == b"r"
    assert [m.get("more_body") for m in client.messages[1:]] == [True] * (len(api.parts) - 1) + [False]


async def test_the_two_speak_of_it_among_themselves(line: ProxyAndRouter) -> None:
    forged = [(b"x-warmpath-reply-to", b"0" * 32 + b"-0"), (b"content-length", b"2")]
    client = await answered(line, headers=forged)
    assert not [
        name for name in client.headers() if name.startswith((b"x-warmpath-bod", b"x-warmpath-reply"))
    ]
    told = [value for name, value in line.call.scopes[-1]["headers"] if name == b"x-warmpath-reply-to"]
    assert len(told) == 1
    assert not told[0].startswith(b"0" * 32)


async def test_an_answer_in_one_message_goes_by_the_call(line: ProxyAndRouter, api: Api) -> None:
    api.is_event_stream = False
    before = line.statistics.by_channel
    client = await answered(line)
    assert (client.content, client.is_whole) == (b"".join(api.parts), True)
    assert line.statistics.by_channel == before


async def test_a_failure_before_the_answer_is_told_by_serve(line: ProxyAndRouter, api: Api) -> None:
    async def fails(*_: object) -> None:
        raise RuntimeError("at once")

    line.call._router = fails
    line.call.failure_status = 503
    client = await answered(line)
    assert client.messages[0]["status"] == 503
    assert b"Serve" not in client.content


@pytest.mark.parametrize("failure_status", [500, 503])
@pytest.mark.parametrize("num_parts", [1, 2])
async def test_a_failure_in_the_middle_leaves_the_answer_unfinished(
    line: ProxyAndRouter, api: Api, failure_status: int, num_parts: int
) -> None:
    api.fails_after, line.call.failure_status = num_parts, failure_status
    client = await answered(line)
    assert client.content == b"".join(api.parts[:num_parts])
    assert not client.is_whole
    assert [m["type"] for m in client.messages].count("http.response.start") == 1


async def test_a_client_that_goes_ends_the_request(line: ProxyAndRouter, api: Api) -> None:
    api.holds_after = 1
    api.held.clear()
    client = Client(line)
    await api.held.wait()
    await until(lambda: client.content == api.parts[0])
    client.go()
    async with asyncio.timeout(2):  # less than a proxy waits for late pieces
        await client.task
    assert api.num_cancelled == 1
    assert not line.bodies._routers._readers


async def test_bodies_go_by_the_channel_once_it_is_there(channel: ProxyAndRouter) -> None:
    assert (channel.statistics.by_call, channel.statistics.by_channel) == (1, 1)
    client = await answered(channel)
    assert channel.statistics.by_channel == 2
    assert client.headers()[b"x-request-id"] == b"mine"  # Serve puts it on what comes by the call


async def test_a_body_comes_with_its_request(channel: ProxyAndRouter, api: Api) -> None:
    before = len(channel.whole)
    await answered(channel, b"0123")
    assert api.bodies[-1] == b"0123"
    assert len(channel.whole) == before + 1
    assert channel.call.scopes[-1]["warmpath.body"] == b"0123"


async def test_a_request_that_outlives_its_client_is_fetched(channel: ProxyAndRouter, api: Api) -> None:
    """Serve cancels nothing then: what it fetches is the only news of a client that has gone."""
    headers = [(b"content-length", b"4"), (b"x-request-disconnect-disabled", b"?1")]
    before = len(channel.whole)
    assert (await answered(channel, b"0123", headers=headers)).is_whole
    assert (api.bodies[-1], len(channel.whole)) == (b"0123", before)


async def test_a_large_body_is_fetched(
    channel: ProxyAndRouter, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_bodies, "MAX_BODY_BYTES", 3)
    await answered(channel, b"0123")
    assert api.bodies[-1] == b"0123"
    assert "warmpath.body" not in channel.call.scopes[-1]
    await answered(channel, b"01234", headers=[(b"transfer-encoding", b"chunked")])
    assert api.bodies[-1] == b"01234"


async def test_a_body_that_stops_is_the_routers_to_wait_for(
    channel: ProxyAndRouter, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone has limits for that, and says so when they are over: the proxy waited for good."""
    monkeypatch.setattr(proxy_bodies, "BODY_WAIT_S", 0.02)
    before = len(channel.call.scopes), channel.statistics.by_channel
    client = Client(channel, b"0123")
    client.sends.clear()
    await until(lambda: len(channel.call.scopes) > before[0])
    assert "warmpath.body" not in channel.call.scopes[-1]
    client.sends.set()
    async with asyncio.timeout(10):
        await client.task
    assert (api.bodies[-1], client.is_whole) == (b"0123", True)
    assert channel.statistics.by_channel == before[1] + 1


async def test_another_application_is_left_alone(channel: ProxyAndRouter, api: Api) -> None:
    """Behind the same proxy, with a body of its own to receive."""

    async def other(_scope: Scope, receive: Receive, send: Send) -> None:
        content = await body(receive)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": content})

    ours, channel.call._router = channel.call._router, other
    for path in ("/other", "/other", PATH, PATH):  # the last one was a Router's until now
        assert (await answered(channel, b"theirs", path=path)).content == b"theirs"
    # Who knows the channel's name could take the proxy's place.
    told = [dict(scope["headers"])[b"x-warmpath-reply-to"] for scope in channel.call.scopes[-4:]]
    assert [name == b"-" for name in told] == [True, True, False, True]
    channel.call._router = ours
    before = channel.statistics.by_channel
    for _ in range(2):
        assert (await answered(channel)).is_whole
    assert channel.statistics.by_channel == before + 1


async def test_errors_of_a_router_tell_nothing_of_paths(channel: ProxyAndRouter, api: Api) -> None:
    """A scanner's many paths push out none that is used, and a client's mistakes do not make one unknown."""
    api.status = 404
    for number in range(2 * proxy_bodies.MAX_PATHS):
        await answered(channel, path=f"/{number}")
    await answered(channel)
    assert list(channel.bodies._paths) == [PATH]
    api.status = 200
    for number in range(2 * proxy_bodies.MAX_PATHS):
        await answered(channel, path=f"/{number}")
    assert len(channel.bodies._paths) == proxy_bodies.MAX_PATHS


@pytest.mark.parametrize("num_parts", [3, 50])
async def test_a_request_sent_before_there_was_a_connection_is_answered_by_the_call(
    api: Api, num_parts: int
) -> None:
    api.parts = [b"x"] * num_parts
    api.holds_at_start = True
    line = ProxyAndRouter(api)
    early = Client(line)
    await api.held.wait()
    api.holds_at_start = False
    await connect(line)
    api.go_on.set()
    async with asyncio.timeout(10):
        await early.task
    assert (early.content, early.is_whole) == (b"x" * num_parts, True)
    await line.close()


async def test_a_client_that_goes_before_its_body_is_whole_asks_nothing(channel: ProxyAndRouter) -> None:
    before = len(channel.call.scopes)
    client = Client(channel, b"0123")
    client._unsent.pop()
    client._unsent[0] = b"01"
    client.go()

    async def receive() -> Message:
        if client._unsent:
            return {"type": "http.request", "body": client._unsent.pop(), "more_body": True}
        return {"type": "http.disconnect"}

    client._receive = receive  # type: ignore[method-assign]
    client.task.cancel()
    scope = {"type": "http", "method": "POST", "path": PATH, "headers": [(b"content-length", b"4")]}
    await channel.bodies(scope, receive, client._send)
    assert len(channel.call.scopes) == before
    assert client.messages == []


async def test_a_slow_client_holds_its_own_answer_back_and_no_other(
    channel: ProxyAndRouter, api: Api
) -> None:
    api.parts = [bytes([65 + n % 26]) * 1000 for n in range(200)]
    slow = Client(channel)
    slow.takes.clear()
    await until(lambda: any(reader._is_paused for reader in channel.bodies._routers._readers.values()))
    other = await answered(channel)
    assert other.content == b"".join(api.parts)
    reader = next(iter(channel.bodies._routers._readers.values()))
    assert len(reader._unread) < len(api.parts) // 2
    assert len(reader._unread) >= PAUSED_PIECES
    slow.takes.set()
    await slow.task
    assert (slow.content, slow.is_whole) == (b"".join(api.parts), True)


@pytest.mark.parametrize("lag_s", [0.0, 1000.0])
async def test_who_takes_nothing_is_dropped_by_the_proxy_too(
    channel: ProxyAndRouter, api: Api, lag_s: float
) -> None:
    """It waited for that client for as long as it stayed, with all that had come, if anything had."""
    api.failure, api.fails_after = AnswerNotTaken(1.0), 2
    if lag_s:
        channel.lag(lag_s)
    client = Client(channel)
    client.takes.clear()
    async with asyncio.timeout(10):
        with pytest.raises(PiecesLost):
            await client.task
    client.transport.abort.assert_called_once_with()
    assert client.messages == []
    assert not channel.bodies._routers._readers
    if not lag_s:
        api.fails_after = None
        reads = await answered(channel)
        assert (reads.is_whole, reads.transport.abort.called) == (True, False)


async def test_what_a_lost_connection_had_is_not_taken_for_the_whole(
    channel: ProxyAndRouter, api: Api
) -> None:
    api.holds_after = 2
    api.held.clear()
    client = Client(channel)
    await api.held.wait()
    await until(lambda: client.content == b"".join(api.parts[:2]))
    channel.cut()
    api.go_on.set()
    with pytest.raises(PiecesLost):
        await client.task
    assert not client.is_whole
    api.holds_after = None
    assert (await answered(channel)).is_whole  # by the call
    await until(lambda: not channel.bodies._routers.is_connected)


async def test_a_lost_connection_is_made_anew(
    channel: ProxyAndRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_connections, "RETRY_S", 0.0)
    channel.cut()
    await until(lambda: not channel.bodies._routers.is_connected)
    await connect(channel)
    before = channel.statistics.by_channel
    assert (await answered(channel)).is_whole
    assert channel.statistics.by_channel == before + 1


async def test_a_router_that_cannot_be_reached_answers_by_calls(
    api: Api, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_connections, "RETRY_S", 0.0)
    logger = logging.getLogger("ray.serve")
    logger.addHandler(caplog.handler)
    line = ProxyAndRouter(api)
    try:
        assert line.server is not None
        line.server.endpoint = "tcp://127.0.0.1:1"
        for _ in range(3):
            assert (await answered(line)).is_whole
            await until(lambda: not line.bodies._routers._tasks)
    finally:
        logger.removeHandler(caplog.handler)
        await line.close()
    told = {id(record) for record in caplog.records if "no connection for bodies" in record.message}
    assert len(told) == 1


async def test_pieces_that_never_come_end_the_answer(
    channel: ProxyAndRouter, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_bodies, "LATE_PIECE_LIMIT_S", 0.05)
    channel.lag(1000.0)
    client = Client(channel)
    await client.task
    assert client.messages[0]["status"] == 500
    assert b"internal_error" in client.content


@given(
    parts=st.lists(st.binary(max_size=40), min_size=1, max_size=12),
    turns_late=st.integers(0, 5),
    lag_ms=st.sampled_from([0, 0, 1, 3]),
    fails_after=st.none() | st.integers(0, 12),
    failure_status=st.sampled_from([500, 503]),
    turns_before_connecting=st.none() | st.integers(0, 20),
)
@settings(max_examples=80)
def test_whatever_overtakes_what_the_client_has_what_was_sent(
    parts: list[bytes],
    turns_late: int,
    lag_ms: int,
    fails_after: int | None,
    failure_status: int,
    turns_before_connecting: int | None,
) -> None:
    """turns_before_connecting: None = it is connected before the request comes."""

    async def run() -> None:
        api = Api()
        line = ProxyAndRouter(api)
        if turns_before_connecting is None:
            await connect(line)
            if lag_ms:
                line.lag(lag_ms / 1000)
        api.parts, api.fails_after = parts, fails_after
        line.call.turns_late, line.call.failure_status = turns_late, failure_status
        client = Client(line)
        if turns_before_connecting is not None:
            for _ in range(turns_before_connecting):
                await asyncio.sleep(0)
            assert line.server is not None
            line.bodies._routers.learn(line.server.endpoint)
            line.bodies._learn(PATH, is_routers=True)
        async with asyncio.timeout(10):
            await client.task
        is_failed = fails_after is not None and fails_after < len(parts)
        assert client.is_whole is not is_failed or not client.content
        if is_failed and client.messages[0]["status"] != 200:
            assert client.messages[0]["status"] == failure_status  # Serve's, before any part was here
        else:
            assert client.content == b"".join(parts[:fails_after] if is_failed else parts)
        await line.close()

    asyncio.run(run())


async def test_an_endpoint_that_is_none_is_forgotten(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_connections, "RETRY_S", 0.0)
    line = ProxyAndRouter(api)
    for endpoint in ("tcp://127.0.0.1:99999", "tcp://127.0.0.1:x", "http://127.0.0.1:80"):
        line.bodies._routers.learn(endpoint)
    tasks = list(line.bodies._routers._tasks.values())
    await asyncio.gather(*tasks)  # raises nothing
    assert not line.bodies._routers._tasks
    await line.close()


async def test_the_request_that_a_dead_router_left_is_named_as_serve_names_it() -> None:
    async def dead(_scope: Scope, _receive: Receive, _send: Send) -> None:
        return

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    app = OneErrorShape(BodiesFromRouters(RequestIdMiddleware(dead)))
    await app({"type": "http", "method": "POST", "path": PATH, "headers": []}, receive, send)
    assert sent[0]["status"] == 500
    assert dict(sent[0]["headers"])[b"x-request-id"]
