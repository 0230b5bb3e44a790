"""The edge to Ray without a cluster: which loop, and whose error."""

from __future__ import annotations

import asyncio
from array import array
from types import SimpleNamespace
from unittest import mock

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError

from cache.channel.frames import ReplyTo
from cache.channel.reader import PieceReader
from cache.delta_frames import DeltaPiece
from cache.errors import ConfigError, PiecesLost, QueueFull
from cache.messages import Delta, GenerateRequest, SamplingParams
from cache.types import RequestId
from router import ingress
from router.deltas import delta_calls
from router.errors import AllBusy, NoReplica, ReplicaLost
from router.ingress import HandleCalls, check_one_loop, place_among_routers, translate


@pytest.mark.parametrize(
    ("environment", "is_accepted"),
    [
        ({"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}, True),
        ({"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}, True),
        ({}, False),
        ({"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1"}, False),
        ({"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1"}, False),
    ],
)
def test_it_refuses_to_run_on_two_event_loops(environment: dict[str, str], is_accepted: bool) -> None:
    if is_accepted:
        check_one_loop(environment)
    else:
        with pytest.raises(ConfigError, match="RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"):
            check_one_loop(environment)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ActorDiedError(), ReplicaLost),
        (ActorUnavailableError("gone", None), ReplicaLost),
        (RequestCancelledError("r"), ReplicaLost),
        (BackPressureError(1, 1), AllBusy),
        (DeploymentUnavailableError("d"), NoReplica),
        (NoReplica(), NoReplica),
        (ValueError("x"), ValueError),
    ],
)
def test_rays_errors_become_ours(error: Exception, kind: type[Exception]) -> None:
    assert type(translate(error)) is kind


@pytest.mark.parametrize("cause", [QueueFull(3, 4), ValueError("x")])
def test_what_a_replica_raised_is_unwrapped(cause: Exception) -> None:
    wrapped = RayTaskError("generate", "trace", cause).as_instanceof_cause()
    assert translate(wrapped) is cause


class HangingCall:
    """Says nothing, and does not end by itself."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def __aiter__(self) -> HangingCall:
        return self

    async def __anext__(self) -> Delta:
        await asyncio.Event().wait()
        raise AssertionError

    def cancel(self) -> None:
        self.is_cancelled = True


async def test_a_call_whose_deltas_are_lost_is_ended_before_another_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would go on until its replica has something to send, and refuse the next attempt as its double."""
    monkeypatch.setattr(delta_calls, "LAST_WORDS_LIMIT_S", 0.01)
    call, reader, connection = HangingCall(), PieceReader(ReplyTo(bytes(16), 0)), mock.Mock()
    handle = mock.Mock()
    handle.options.return_value.remote.return_value = call
    channels = mock.Mock(open=lambda _request: reader)
    request = GenerateRequest(RequestId("r"), array("i", [1]), 1, SamplingParams(max_tokens=9), 1)
    reader.receive(DeltaPiece(0, 0, "a", (1,), 0, None, 0), connection)
    deltas = HandleCalls(handle, channels).generate(request)
    assert (await anext(deltas)).text == "a"
    reader.lose()
    with pytest.raises(PiecesLost):
        await anext(deltas)
    assert call.is_cancelled


class CutCall(HangingCall):
    """Its channel has been closed under it, which gRPC tells as a cancellation."""

    async def __anext__(self) -> Delta:
        raise asyncio.CancelledError


async def test_a_call_that_somebody_else_cancelled_is_a_lost_replica() -> None:
    """Its client was answered "Internal Server Error", in plain text, where another attempt was due."""
    call, handle = CutCall(), mock.Mock()
    handle.options.return_value.remote.return_value = call
    request = GenerateRequest(RequestId("r"), array("i", [1]), 1, SamplingParams(max_tokens=9), 1)
    with pytest.raises(ReplicaLost, match="the call was cancelled"):
        await anext(HandleCalls(handle).generate(request))
    assert call.is_cancelled


async def test_a_call_whose_own_task_is_cancelled_is_cancelled() -> None:
    call, handle = HangingCall(), mock.Mock()
    handle.options.return_value.remote.return_value = call
    request = GenerateRequest(RequestId("r"), array("i", [1]), 1, SamplingParams(max_tokens=9), 1)
    deltas = HandleCalls(handle).generate(request)
    task = asyncio.ensure_future(anext(deltas))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert call.is_cancelled


@pytest.mark.parametrize("method", ["unpin", "inherit"])
async def test_a_pins_call_that_somebody_else_cancelled_is_a_lost_replica(method: str) -> None:
    async def cut() -> None:
        raise asyncio.CancelledError

    handle = mock.Mock()
    handle.options.return_value.remote = lambda _request: cut()
    with pytest.raises(ReplicaLost, match="the call was cancelled"):
        await getattr(HandleCalls(handle), method)(mock.Mock())


class UnheardCall(HangingCall):
    """Accepted, and over before Serve has read that it was: as it ends a stream without a message then."""

    async def __anext__(self) -> Delta:
        raise RuntimeError("Unexpected error (StatusCode.OK): .")


async def test_an_answer_that_is_over_before_serve_heard_it_accepted_is_whole() -> None:
    """It was a 500."""
    reader, handle = PieceReader(ReplyTo(bytes(16), 0)), mock.Mock()
    handle.options.return_value.remote.return_value = UnheardCall()
    channels = mock.Mock(open=lambda _request: reader)
    request = GenerateRequest(RequestId("r"), array("i", [1]), 1, SamplingParams(max_tokens=1), 1)
    last = DeltaPiece(0, 0, "a", (1,), 0, "length", 0)
    asyncio.get_running_loop().call_later(0.01, reader.receive, last, mock.Mock())
    assert [delta.text async for delta in HandleCalls(handle, channels).generate(request)] == ["a"]


async def test_a_call_that_cannot_even_be_made_leaves_no_reader() -> None:
    """It stayed registered for ever, and the error came as Ray's."""
    handle, reader = mock.Mock(), PieceReader(ReplyTo(bytes(16), 0))
    handle.options.return_value.remote.side_effect = DeploymentUnavailableError("d")
    channels = mock.Mock(open=lambda _request: reader)
    request = GenerateRequest(RequestId("r"), array("i", [1]), 1, SamplingParams(max_tokens=9), 1)
    with pytest.raises(NoReplica):
        await anext(HandleCalls(handle, channels).generate(request))
    channels.close.assert_called_once_with(reader)


def test_a_router_outside_serve_has_no_peers() -> None:
    assert place_among_routers() == (0, 1)


@pytest.mark.parametrize(("rank", "world_size", "place"), [(1, 4, (1, 4)), (3, 2, (1, 2)), (0, 0, (0, 1))])
def test_serve_tells_a_router_its_place(
    monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int, place: tuple[int, int]
) -> None:
    context = SimpleNamespace(rank=SimpleNamespace(rank=rank), world_size=world_size)
    monkeypatch.setattr("router.ingress.serve.get_replica_context", lambda: context)
    assert place_among_routers() == place


def test_the_routers_that_there_are_count_and_not_those_that_there_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serve reconfigures nobody where their number alone changes: who stayed took itself for one of as many
    as before, for good."""
    context = SimpleNamespace(rank=SimpleNamespace(rank=0), world_size=1)
    monkeypatch.setattr("router.ingress.serve.get_replica_context", lambda: context)
    assert place_among_routers(3) == (0, 3)


async def test_an_address_that_cannot_be_bound_leaves_answers_to_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "203.0.113.7")  # nobody's
    assert ingress._body_server() is None
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    server = ingress._body_server()
    assert server is not None
    server.close()
