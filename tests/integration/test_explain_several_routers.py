"""`python -m router` asks two Routers behind one address, each of which remembers only its own requests.

Real Router cores and real HTTP, no Ray. Routers do not ask each other about requests: one that does not know
an id says so with its name, and the command asks on, each time on a new connection.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from router import __main__ as command
from router.insight.debug_client import TOKEN_VARIABLE
from tests.fakes.http import MODEL, RouterUnderTest, error_of
from tests.http_server import HttpServer, serving

NUM_ROUTERS = 2
CHOOSE = "x-test-router"  # index of the Router that is to answer; without it they take turns


class InTurn:
    """What stands before the Routers, as a proxy does: whoever's turn it is answers."""

    def __init__(self, routers: list[RouterUnderTest]) -> None:
        self._routers = routers
        self._turns = itertools.cycle(range(len(routers)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked_for = dict(scope["headers"]).get(CHOOSE.encode())
        index = next(self._turns) if asked_for is None else int(asked_for)
        await self._routers[index].api(scope, receive, send)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)

    @contextlib.asynccontextmanager
    async def make_app() -> AsyncIterator[ASGIApp]:
        async with contextlib.AsyncExitStack() as undo:
            routers = [
                RouterUnderTest(expose_debug=True, place=(index, NUM_ROUTERS)) for index in range(NUM_ROUTERS)
            ]
            for router in routers:
                await undo.enter_async_context(router)
            yield InTurn(routers)

    with serving(make_app) as running:
        yield running


def complete(server: HttpServer, router: int, name: str) -> None:
    """A request that this Router decides."""
    body = {"model": MODEL, "prompt": f"{name} has a prompt", "max_tokens": 4}
    headers = {CHOOSE: str(router), "x-request-id": name}
    assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200


def ask(server: HttpServer, router: int, **query: str) -> httpx.Response:
    return httpx.get(f"{server.url}/debug/route", params=query, headers={CHOOSE: str(router)})


def run(server: HttpServer, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    status = command.main([*arguments, "--url", server.url])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_request_is_known_to_the_router_that_decided_it_alone(server: HttpServer) -> None:
    complete(server, 1, "mine")
    [known] = ask(server, 1, request_id="mine").json()["requests"]
    assert known["request_id"].startswith("mine-")
    refused = ask(server, 0, request_id="mine")
    assert (refused.status_code, error_of(refused)["code"]) == (404, "request_not_found")
    assert refused.headers["x-warmpath-router"] == ask(server, 0).json()["summary"]["router"]


@pytest.mark.parametrize("router", range(NUM_ROUTERS))
def test_whichever_router_decided_the_command_explains_it(
    server: HttpServer, capsys: pytest.CaptureFixture[str], router: int
) -> None:
    complete(server, 1 - router, "other")
    complete(server, router, "mine")
    status, out, err = run(server, capsys, "explain", "mine")
    assert status == 0, err
    assert "A prompt of 17 tokens: 4 full blocks of 4 and 1 behind them." in out
    assert "Nobody held any of it" in out
    assert "4 tokens out" in out


def test_what_none_of_them_remembers_is_said_after_asking_all(
    server: HttpServer, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(server, capsys, "explain", "nobody's")
    assert status == 1
    assert f"is not remembered ({NUM_ROUTERS} Routers asked)" in err


def test_advice_is_on_what_all_of_them_have_answered(
    server: HttpServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for router, name in enumerate(["one", "two"]):
        complete(server, router, name)
    status, out, err = run(server, capsys, "advise")
    assert status == 0, err
    assert f"{NUM_ROUTERS} Routers answered." in out
    assert "2 requests, 32 prompt tokens" in out
