"""Other Routers asked through Serve's calls: who answers in time is heard, whoever else is not."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException

from cache.types import PinId, ReplicaId
from router import serve_peers
from router.ingress import Ingress
from router.prefixes.tombstones import GivenBack
from router.serve_peers import GIVEN_BACK, HANDED_ON, KEPT, METHOD, ServePeers, among_routers

TIMEOUT_S = 0.2


class OneCall:
    """A call's result as Serve gives it."""

    def __init__(self, outcome: bytes | bool | Exception | None) -> None:
        """None: it never comes."""
        self._outcome = outcome
        self.was_cancelled = False

    async def get_async(self) -> bytes | bool:
        if self._outcome is None:
            await asyncio.Event().wait()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def cancel(self) -> None:
        self.was_cancelled = True


class Handle:
    """A deployment handle, and the response to its broadcast."""

    def __init__(self, *calls: OneCall, error: Exception | None = None, hangs: bool = False) -> None:
        self._calls, self._error, self._hangs = calls, error, hangs
        self.asked: list[tuple[Any, ...]] = []

    def broadcast(self, *args: Any) -> Handle:
        self.asked.append(args)
        return self

    async def _fetch_replica_results_async(self) -> list[OneCall]:
        if self._hangs:  # Serve has not told yet who there is
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error
        return list(self._calls)


def peers_of(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> ServePeers:
    monkeypatch.setattr(serve_peers.serve, "get_deployment_handle", lambda *_names, **_how: handle)
    return ServePeers("Router", "warmpath")


async def test_everybody_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle(OneCall(b"a"), OneCall(b"b"))
    answers = await peers_of(handle, monkeypatch).ask("me", ("gone",), TIMEOUT_S)
    assert sorted(answers) == [b"a", b"b"]
    assert handle.asked == [(METHOD, "me", ["gone"])]


async def test_a_hung_router_costs_its_own_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its call is taken back: scrapes must not pile up there."""
    hung = OneCall(None)
    handle = Handle(OneCall(b"a"), hung, OneCall(b"c"))
    assert sorted(await peers_of(handle, monkeypatch).ask("me", (), TIMEOUT_S)) == [b"a", b"c"]
    assert hung.was_cancelled


async def test_a_router_that_died_under_the_call_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle(OneCall(RayActorError()), OneCall(b"b"))
    assert await peers_of(handle, monkeypatch).ask("me", (), TIMEOUT_S) == [b"b"]


@pytest.mark.parametrize(
    "handle",
    [
        Handle(),
        Handle(error=RayServeException("unavailable")),
        Handle(error=RayActorError()),
        Handle(hangs=True),
    ],
)
async def test_nobody_there_is_no_error(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await peers_of(handle, monkeypatch).ask("me", (), TIMEOUT_S) == []


async def test_who_does_not_say_what_it_keeps_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all others do not know is nowhere only if there is none such."""
    handle = Handle(OneCall(b"a"), OneCall(None), OneCall(RayActorError()), OneCall(b""))
    answers = await peers_of(handle, monkeypatch).kept_prefixes("me", TIMEOUT_S)
    assert answers.count(None) == 2
    assert sorted(wire for wire in answers if wire is not None) == [b"", b"a"]
    assert handle.asked == [(KEPT, "me")]


def _lacking(method: str) -> RayServeException:
    """As Serve's replicas say it (ray 2.60)."""
    return RayServeException(
        f"Tried to call a method '{method}' that does not exist. Available methods: ['fleet_report']."
    )


async def test_who_has_no_such_call_keeps_nothing_that_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Router of an older version: while one was there, unknown ids were 503 and not 404."""
    handle = Handle(OneCall(b"a"), OneCall(_lacking(KEPT)))
    assert sorted(await peers_of(handle, monkeypatch).kept_prefixes("me", TIMEOUT_S)) == [b"", b"a"]


@pytest.mark.parametrize("error", [_lacking("another"), RayServeException("gone"), AttributeError("x")])
async def test_who_fails_otherwise_may_keep_some(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle(OneCall(b"a"), OneCall(error))
    assert await peers_of(handle, monkeypatch).kept_prefixes("me", TIMEOUT_S) == [b"a", None]


async def test_where_serve_does_not_say_whom_to_ask_somebody_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await peers_of(Handle(hangs=True), monkeypatch).kept_prefixes("me", TIMEOUT_S) == [None]


async def test_everybody_hears_what_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle(OneCall(False), OneCall(True), OneCall(None))
    peers = peers_of(handle, monkeypatch)
    assert sorted(await peers.prefix_given_back("me", PinId("prefix-1"), TIMEOUT_S)) == [False, True]
    assert handle.asked == [(GIVEN_BACK, "me", "prefix-1")]


@pytest.mark.parametrize(
    ("calls", "is_heard"),
    [([OneCall(None), OneCall(b"")], False), ([OneCall(b""), OneCall(b"")], True), ([], False)],
)
async def test_everybody_is_told_at_once_what_was_given_back(
    monkeypatch: pytest.MonkeyPatch, calls: list[OneCall], is_heard: bool
) -> None:
    """All of it by one call. Whether everybody has heard, and somebody has."""
    handle = Handle(*calls)
    seconds = {PinId("prefix-1"): (5.0, 600.0), PinId("prefix-2"): (305.0, 900.0)}
    given_back = GivenBack(seconds, (ReplicaId("r0"),))
    told = await peers_of(handle, monkeypatch).prefixes_handed_on("me", given_back, TIMEOUT_S)
    assert told is is_heard
    assert handle.asked == [(HANDED_ON, "me", seconds, ["r0"])]


def test_what_is_called_there_is() -> None:
    """By name, through Serve: no type checker sees it."""
    calls: tuple[tuple[str, tuple[object, ...]], ...] = (
        (METHOD, ("me", [])),
        (KEPT, ("me",)),
        (GIVEN_BACK, ("me", "prefix-1")),
        (HANDED_ON, ("me", {}, [])),
    )
    for name, args in calls:
        inspect.signature(getattr(Ingress, name)).bind(None, *args)


async def test_without_serve_there_is_nobody_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """While Serve is being shut down: this Router's own metrics are told all the same."""

    def fail(*_names: str, **_how: bool) -> Handle:
        raise RayServeException("There is no Serve instance running on this Ray cluster.")

    monkeypatch.setattr(serve_peers.serve, "get_deployment_handle", fail)
    assert await ServePeers("Router", "warmpath").ask("me", (), TIMEOUT_S) == []


async def test_the_controller_is_not_asked_for_a_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve waits for its answer where it is asked, which is on the event loop."""
    asked: list[dict[str, Any]] = []

    def handle_of(*_names: str, **how: Any) -> Handle:
        asked.append(how)
        return Handle(OneCall(b"a"))

    inspect.signature(serve_peers.serve.get_deployment_handle).bind("Router", "warmpath", _check_exists=False)
    monkeypatch.setattr(serve_peers.serve, "get_deployment_handle", handle_of)
    assert await ServePeers("Router", "warmpath").ask("me", (), TIMEOUT_S) == [b"a"]
    assert asked == [{"_check_exists": False}]


async def test_whoever_stops_waiting_takes_every_call_back(monkeypatch: pytest.MonkeyPatch) -> None:
    hung = OneCall(None)
    asking = asyncio.create_task(peers_of(Handle(hung), monkeypatch).ask("me", (), 60.0))
    await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert hung.was_cancelled


def test_outside_serve_there_is_nobody_to_ask() -> None:
    assert among_routers() is None


@pytest.mark.parametrize("is_asked", [True, False])
async def test_it_knows_how_many_routers_the_latest_call_went_to(
    monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    peers = peers_of(Handle(OneCall(b"a"), OneCall(b"b"), OneCall(RayActorError())), monkeypatch)
    assert peers.num_running is None
    if is_asked:
        await peers.ask("a", [], TIMEOUT_S)
    else:
        await peers.count(TIMEOUT_S)
    assert peers.num_running == 3
