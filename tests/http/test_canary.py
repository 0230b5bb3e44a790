"""No text of a prompt leaves a Router or a replica but in its answer.

Not in logs, metrics, traces, debug pages, the journal, recordings or errors, whether the request succeeded or
failed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cache.messages import Delta, GenerateRequest
from cache.types import ReplicaId
from router.config import RecordConfig
from tests.canary import CANARY, marks, provoke, traces_of
from tests.fakes.http import MODEL, RouterUnderTest
from tests.http_server import engine_server, scripted_server

OURS = ("router", "replica", "cache", "deploy", "ray", "uvicorn", "asyncio")
MIN_REFUSED = 28


class Noted:
    """A tracer that keeps all it is told, as text; and each of its spans."""

    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    def __init__(self) -> None:
        self.told: list[str] = []

    def begin(self, *named: object, **options: object) -> Noted:
        self.told.append(f"{named} {options}")
        return self

    def tell(self, attributes: object) -> None:
        self.told.append(str(attributes))

    def end(self, *error: object, **options: object) -> None:
        self.told.append(f"{error} {options}")

    def close(self) -> None:
        pass


@pytest.fixture
def everything_logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """At the lowest level: what is not said today may be tomorrow."""
    with caplog.at_level(logging.DEBUG):
        yield caplog


def said(caplog: pytest.LogCaptureFixture) -> bytes:
    """Every field of every record of ours, tracebacks included."""
    records = [record for record in caplog.records if record.name.partition(".")[0] in OURS]
    formatter = logging.Formatter()
    return "\n".join(f"{formatter.format(each)} {each.__dict__}" for each in records).encode()


def shown(client: httpx.Client, *request_ids: str) -> bytes:
    """What every page that tells of requests says."""
    pages = [
        "/metrics",
        "/version",
        "/v1/prefixes",
        "/health",
        "/openapi.json",
        "/debug/route?last=200",
        "/dashboard/data",
    ]
    pages += [f"/debug/route?request_id={request_id}" for request_id in request_ids]
    answers = [client.get(page) for page in pages]
    assert [answer.status_code for answer in answers] == [200] * len(pages)
    return b"\n".join(answer.content for answer in answers)


def test_nothing_of_a_prompt_is_written_or_shown(
    tmp_path: Path, everything_logged: pytest.LogCaptureFixture
) -> None:
    tracing = Noted()
    config: dict[str, Any] = {
        "log_requests": True,
        "expose_debug": True,
        "dashboard": True,
        "expose_routing": True,
        "shadow_policy": "prodstack_prefix",  # it places by text, and keeps some
        "record": RecordConfig(folder=str(tmp_path)),
    }
    with (
        engine_server(tracing=tracing, replica={"max_model_len": 4096}, **config) as server,
        httpx.Client(base_url=server.url, timeout=60, headers={"x-session-id": CANARY}) as client,
    ):
        given_away = marks(client)
        assert provoke(client) >= MIN_REFUSED
        body = {"model": MODEL, "prompt": CANARY, "max_tokens": 2}
        answer_id = client.post("/v1/completions", json=body).json()["id"]
        assert len(client.get("/v1/prefixes").json()["data"]) == 2, "nothing is held"
        pages = shown(client, answer_id)
    assert list(tmp_path.iterdir()), "nothing was recorded"
    logged = said(everything_logged)
    assert b"request ended" in logged
    assert b"generation ended" in logged
    traced = "\n".join(tracing.told).encode()
    assert all(name in traced for name in (b"'ingress'", b"'tokenize'", b"'decide'", b"'prefill'"))
    assert not [mark for mark in given_away if mark in traced]
    assert not [mark for mark in given_away if mark in pages]
    assert not [mark for mark in given_away if mark in logged]
    assert traces_of(given_away, tmp_path) == []


async def quoting(request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
    """As libraries do that quote what they were given."""
    if request.sampling.max_tokens > 1:
        yield Delta("a", (1,), 0)
    raise ValueError(f"cannot compute {CANARY} of {request.token_ids}")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 2])  # before and after the first token
def test_an_error_that_quotes_a_prompt_is_told_without_it(
    everything_logged: pytest.LogCaptureFixture, stream: bool, max_tokens: int
) -> None:
    router = RouterUnderTest(expose_debug=True, dashboard=True, log_requests=True)
    router.follow(quoting)
    body = {"model": MODEL, "prompt": CANARY, "max_tokens": max_tokens, "stream": stream}
    with scripted_server(router) as server, httpx.Client(base_url=server.url) as client:
        given_away = marks(client)
        text = b""
        try:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                for chunk in answer.iter_raw():
                    text += chunk
        except httpx.RemoteProtocolError:  # cut, as it should be
            assert stream
            assert max_tokens == 2
        pages = shown(client)
    assert b"internal_error" in text
    logged = said(everything_logged)
    assert b"request failed" in logged
    assert not [mark for mark in given_away if mark in text + pages + logged]


def test_the_canary_would_be_found(tmp_path: Path, everything_logged: pytest.LogCaptureFixture) -> None:
    """The test's own test: in a log field, a traceback and a file."""
    try:
        raise ValueError(CANARY)
    except ValueError:
        logging.getLogger("router.x").debug("failed", extra={"prompt": [1, 2, 3]}, exc_info=True)
    assert b"canary7Zq4" in said(everything_logged)
    assert b"1, 2, 3" in said(everything_logged)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "log").write_text(f"... {CANARY} ...")
    assert len(traces_of([b"canary7Zq4"], tmp_path)) == 1
