"""Which model is asked for: what the server lists, unless told; and what is said where that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from loadtest.client.endpoint import KEY_VARIABLE, Endpoint
from loadtest.client.errors import BadKey, KeyNeeded, Unreachable
from loadtest.client.question import completion

URL = "http://server"
Serve = Callable[[httpx.Response], None]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """What `/v1/models` answers."""
    monkeypatch.delenv(KEY_VARIABLE, raising=False)

    def answer(response: httpx.Response) -> None:
        def get(url: str, *, headers: dict[str, str], timeout: float) -> httpx.Response:
            with httpx.Client(transport=httpx.MockTransport(lambda request: response)) as client:
                return client.get(url, headers=headers, timeout=timeout)

        monkeypatch.setattr(httpx, "get", get)

    return answer


def test_the_first_model_listed_is_asked_for(serve: Serve) -> None:
    serve(httpx.Response(200, json={"data": [{"id": "one"}, {"id": "two"}]}))
    assert Endpoint.find(f"{URL}/v1/") == Endpoint(URL, "one")
    assert Endpoint.find(URL, model="three").model == "three"


@pytest.mark.parametrize("listed", [{}, [], {"data": []}, {"data": [1]}, {"data": {"id": "x"}}, None, "x"])
def test_an_odd_list_matters_only_to_who_names_no_model(listed: Any, serve: Serve) -> None:
    serve(httpx.Response(200, json=listed))
    assert Endpoint.find(URL, model="mine").model == "mine"
    with pytest.raises(Unreachable, match="lists no model"):
        Endpoint.find(URL)


@pytest.mark.parametrize("status", [404, 405])
def test_a_server_that_lists_no_models_is_asked_for_the_one_named(status: int, serve: Serve) -> None:
    serve(httpx.Response(status))
    assert Endpoint.find(URL, model="mine").model == "mine"
    with pytest.raises(Unreachable, match=f"answered {status}"):
        Endpoint.find(URL)


def test_a_server_that_fails_is_told_whatever_is_named(serve: Serve) -> None:
    serve(httpx.Response(503))
    with pytest.raises(Unreachable, match="answered 503"):
        Endpoint.find(URL, model="mine")


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_missing_or_wrong_names_what_every_command_has(status: int, serve: Serve) -> None:
    """compare and sweep have no option for it, and locust's has another name."""
    serve(httpx.Response(status))
    with pytest.raises(KeyNeeded, match=f"wants an API key: set {KEY_VARIABLE}.*where it has one"):
        Endpoint.find(URL, model="mine")
    with pytest.raises(KeyNeeded, match=f"wants another API key: set {KEY_VARIABLE}"):
        Endpoint.find(URL, key="old")


@pytest.mark.parametrize("key", ["sk-secret\n", " sk-secret", "sk-secret-é", "\r\n"])
def test_a_key_that_no_header_carries_is_refused_and_not_shown(key: str, serve: Serve) -> None:
    """A file's last line end comes along with its content, and messages end up in logs."""
    serve(httpx.Response(200, json={"data": [{"id": "one"}]}))
    with pytest.raises(BadKey, match=KEY_VARIABLE) as caught:
        Endpoint.find(URL, key=key)
    assert "secret" not in str(caught.value)


def test_sessions_of_a_trace_of_any_name_go_into_a_header() -> None:
    names = ("multi_turn:think_s=12,turns=12 7 cell 0-3", "日志 7 cell 0-3", "日誌 7 cell 0-3", "two\nlines")
    sent = [
        Endpoint(URL, "one").headers(completion("x", max_tokens=1, session=each))["x-session-id"]
        for each in names
    ]
    assert sent[0] == names[0]
    assert len(set(sent)) == len(names)
    assert all(each.isascii() and each.isprintable() for each in sent)


@pytest.mark.parametrize("host", ["127.0..1", "x" * 64, "host:port"])
def test_a_url_whose_host_no_socket_takes_is_named(host: str) -> None:
    """The first two were tracebacks: Python's own error of that is none of httpx's."""
    with pytest.raises(Unreachable, match=rf"http://{host}"):
        Endpoint.find(f"http://{host}")
