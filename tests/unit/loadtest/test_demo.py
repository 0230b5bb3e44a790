"""`make demo` when it cannot run: one line that says what to do, and a status that is not zero."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest

from loadtest import demo

CHUNK = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}}
MODELS = {"data": [{"id": "tiny"}]}
ONE_EACH = ["--rounds", "1", "--questions", "1"]


def data(value: object) -> str:
    return f"data: {json.dumps(value)}\n\n"


DONE = "data: [DONE]\n\n"
WHOLE = data(CHUNK) + data(USAGE) + DONE
ROUTED = {"x-warmpath-replica": "a"}


@contextmanager
def server(
    text: str = WHOLE,
    headers: dict[str, str] = ROUTED,
    *,
    status: int = 200,
    models: Any = MODELS,
    models_status: int = 200,
) -> Iterator[tuple[str, list[httpx.Headers]]]:
    """Its address, and the headers of what it is asked; every answer is this one."""
    asked: list[httpx.Headers] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(models_status, json.dumps(models), {"content-type": "application/json"})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            asked.append(httpx.Headers(dict(self.headers)))
            self._send(status, text, {"content-type": "text/event-stream", **headers})

        def _send(self, code: int, content: str, head: dict[str, str]) -> None:
            self.send_response(code)
            for name, value in {**head, "content-length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *_: object) -> None:
            """Nothing: a test's output is its own."""

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}", asked
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def test_no_server_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--url", "http://127.0.0.1:1"]) == 1
    assert "make serve" in capsys.readouterr().err


def test_ctrl_c_is_a_word_and_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_endpoint", interrupted)
    assert demo.main([]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_both_policies_are_asked_for_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    with server() as (url, asked):
        assert demo.main(["--url", url, "--key", "secret", *ONE_EACH]) == 0
    assert {each["x-warmpath-policy"] for each in asked} == set(demo.ARMS)
    assert {each["authorization"] for each in asked} == {"Bearer secret"}
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    [row] = [row for row in rows if len(row) == 8]
    assert (row[3], row[4], row[6], row[7]) == ("32", "a", "32", "a")


@pytest.mark.parametrize(("status", "says"), [(401, "set OPENAI_API_KEY"), (500, "answered 500")])
def test_a_server_that_refuses_says_what_it_wants(
    status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with server(models_status=status) as (url, _):
        assert demo.main(["--url", url]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "headers", "status", "says"),
    [
        (WHOLE, {}, 200, "expose_routing: true"),
        (data(CHUNK) + data(USAGE), ROUTED, 200, "ended without [DONE]"),
        (data({"error": {"message": "gone"}}), ROUTED, 200, "gone"),
        (data({"error": {"message": "no [/v1] here"}}), ROUTED, 200, "no [/v1] here"),
        (data(CHUNK) + DONE, ROUTED, 200, "without a token or without usage"),
        (json.dumps({"error": {}}), ROUTED, 429, "refused as busy (429)"),
    ],
)
def test_what_cannot_be_measured_is_an_error(
    text: str, headers: dict[str, str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with server(text, headers, status=status) as (url, _):
        assert demo.main(["--url", url, *ONE_EACH]) == 1
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--timeout-s=nan", "not above 0"),
        ("--timeout-s=-1", "not above 0"),
        ("--timeout-s=0", "not above 0"),
        ("--timeout-s=1e300", "below 1,000,000"),
        ("--questions=x", "'x' is not a whole number"),
    ],
)
def test_what_makes_no_sense_is_named(option: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main([option])
    assert told in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        demo.main(["--help"])
    assert "examples\n  make demo" in capsys.readouterr().out


def test_a_replicas_name_may_have_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    with server(headers={"x-warmpath-replica": "[/a]"}) as (url, _):
        assert demo.main(["--url", url, "--rounds", "1"]) == 0
    assert "[/a]" in capsys.readouterr().out
