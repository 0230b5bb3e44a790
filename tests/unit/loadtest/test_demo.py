"""`make demo` when it cannot run: one line that says what to do, and a status that is not zero."""

from __future__ import annotations

import json

import httpx
import pytest

from loadtest import demo
from replica.output.sample_table import questions

CHUNK = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}}


def client(*lines: str, headers: dict[str, str] | None = None, status: int = 200) -> httpx.Client:
    content = "".join(f"{line}\n\n" for line in lines)
    answer = httpx.Response(status, text=content, headers=headers or {})
    return httpx.Client(transport=httpx.MockTransport(lambda _: answer), base_url="http://server")


def ask(client: httpx.Client) -> demo.Answer:
    return demo._ask(client, "tiny", questions()[0], "round_robin", "salt", 1)


def data(value: object) -> str:
    return f"data: {json.dumps(value)}"


def test_no_server_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--url", "http://127.0.0.1:1"]) == 1
    assert "make serve" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "says"), [(401, "--key, or set OPENAI_API_KEY"), (500, "answered 500")])
def test_a_server_that_refuses_says_what_it_wants(status: int, says: str) -> None:
    with pytest.raises(demo.DemoError, match=says):
        demo._served_model(client("{}", status=status))


def test_a_whole_stream() -> None:
    lines = data(CHUNK), data(USAGE), "data: [DONE]"
    answer = ask(client(*lines, headers={"x-warmpath-replica": "a"}))
    assert (answer.cached_tokens, answer.prompt_tokens, answer.replica) == (32, 40, "a")
    assert answer.ttft_s > 0


@pytest.mark.parametrize(
    ("lines", "headers", "status", "says"),
    [
        ((data(CHUNK), data(USAGE), "data: [DONE]"), {}, 200, "expose_routing: true"),
        ((data(CHUNK), data(USAGE)), {"x-warmpath-replica": "a"}, 200, r"cut before \[DONE\]"),
        ((data({"error": {"message": "gone"}}),), {"x-warmpath-replica": "a"}, 200, "the stream failed"),
        ((data(CHUNK), "data: [DONE]"), {"x-warmpath-replica": "a"}, 200, "without a token or without usage"),
        (('{"error": {}}',), {}, 429, "the server answered 429"),
    ],
)
def test_what_cannot_be_measured_is_an_error(
    lines: tuple[str, ...], headers: dict[str, str], status: int, says: str
) -> None:
    with pytest.raises(demo.DemoError, match=says):
        ask(client(*lines, headers=headers, status=status))
