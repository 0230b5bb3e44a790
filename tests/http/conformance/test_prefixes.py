"""Prefixes computed before their traffic, and held: asked of real engines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.conformance.asking import BLOCK, cached, client_of, metric, wait_for
from tests.conformance.rows import row
from tests.http_server import MODEL, HttpServer, engine_server

IN_TURN = {"x-warmpath-policy": "round_robin"}
NUM_BLOCKS = 128  # of each replica: 64 may be pinned
TOOL = {"type": "function", "function": {"name": "f"}}
LONG = "prompts_and_more_words " * 100


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    """Caches small enough to be written over, with room beside the longest request."""
    replica = {"max_model_len": 1024}
    with engine_server(num_blocks=NUM_BLOCKS, replica=replica, expose_routing=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as made:
        yield made


def system(name: str) -> dict[str, str]:
    return {"role": "system", "content": f"{name}: you answer sailors' questions in verse. " * 6}


def hold(client: openai.OpenAI, name: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [system(name)], "copies": 2, "seconds": 60, **fields}
    answer: dict[str, Any] = client.post("/prefixes", cast_to=object, body=body)  # type: ignore[assignment]
    return answer


def listed(client: openai.OpenAI) -> list[dict[str, Any]]:
    answer: Any = client.get("/prefixes", cast_to=object)
    assert answer["object"] == "list"
    found: list[dict[str, Any]] = answer["data"]
    return found


def delete(client: openai.OpenAI, prefix_id: str) -> dict[str, Any]:
    answer: dict[str, Any] = client.delete(f"/prefixes/{prefix_id}", cast_to=object)  # type: ignore[assignment]
    return answer


def turn(client: openai.OpenAI, name: str, question: str) -> tuple[str, int]:
    """(replica, cached tokens) of a chat that begins as the prefix does; wherever it is held, in turn."""
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[system(name), {"role": "user", "content": question}],  # type: ignore[list-item]
        max_tokens=2,
        extra_headers=IN_TURN,
    )
    return answer.headers["x-warmpath-replica"], cached(answer.parse())


@row("POST, GET and DELETE /v1/prefixes")
def test_the_first_request_finds_it_on_each_of_its_replicas(client: openai.OpenAI) -> None:
    held = hold(client, "warm")
    try:
        assert (held["object"], held["status"], held["copies"]) == ("prefix", "held", 2)
        assert held["tokens"] == held["blocks"] * BLOCK <= held["prompt_tokens"]
        assert len(set(held["replicas"])) == 2
        assert held["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        found = {}
        for number in range(4):
            replica, tokens = turn(client, "warm", f"{number}?")
            found.setdefault(replica, tokens)
        assert found == dict.fromkeys(held["replicas"], held["tokens"])
        (told,) = listed(client)
        assert told == {name: held[name] for name in told}
        one: Any = client.get(f"/prefixes/{held['id']}", cast_to=object)
        assert one == told
    finally:
        assert delete(client, held["id"]) == {"id": held["id"], "object": "prefix.deleted", "deleted": True}
    assert listed(client) == []
    with pytest.raises(openai.NotFoundError) as caught:
        delete(client, held["id"])
    assert caught.value.code == "prefix_not_found"


@row("POST, GET and DELETE /v1/prefixes")
def test_it_survives_what_writes_the_cache_over(server: HttpServer, client: openai.OpenAI) -> None:
    held = hold(client, "kept")
    lost = {"role": "system", "content": "lost: " + system("x")["content"]}
    client.chat.completions.create(model=MODEL, messages=[lost], max_tokens=1)  # type: ignore[list-item]
    for number in range(10):  # 40 blocks each: once and a half of each cache
        ids = [number + 5] * 40 * BLOCK
        client.completions.create(model=MODEL, prompt=ids, max_tokens=1, extra_headers=IN_TURN)
    again = client.chat.completions.create(model=MODEL, messages=[lost], max_tokens=1)  # type: ignore[list-item]
    assert cached(again) == 0, "nothing was written over"
    assert turn(client, "kept", "Still?")[1] == held["tokens"]
    assert metric(server, "warmpath_engine_pinned_blocks") == 2 * held["blocks"]
    delete(client, held["id"])
    wait_for(lambda: metric(server, "warmpath_engine_pinned_blocks") == 0)


@row("POST, GET and DELETE /v1/prefixes")
def test_it_is_free_again_when_its_time_is_over(server: HttpServer, client: openai.OpenAI) -> None:
    held = hold(client, "short", seconds=1)
    assert held["expires_at"] - held["created"] == 1
    wait_for(lambda: listed(client) == [])
    wait_for(lambda: metric(server, "warmpath_engine_pinned_blocks") == 0)
    assert time.time() >= held["expires_at"]


@row("POST, GET and DELETE /v1/prefixes")
def test_what_does_not_fit_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    first = hold(client, "first", messages=None, prompt=[7] * 50 * BLOCK)
    with pytest.raises(openai.BadRequestError) as caught:
        hold(client, "second", messages=None, prompt=[8] * 20 * BLOCK)
    assert caught.value.code == "prefix_does_not_fit"
    assert "needs 20 blocks on each of 2 replicas" in str(caught.value)
    assert "14 blocks left" in str(caught.value)
    assert [told["id"] for told in listed(client)] == [first["id"]]
    delete(client, first["id"])


@row("POST, GET and DELETE /v1/prefixes")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"copies": 3}, "copies"),
        ({"copies": 0}, "copies"),
        ({"copies": "2"}, "copies"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": 1.5}, "seconds"),
        ({"seconds": 10**9}, "seconds"),
        ({"messages": None}, "messages"),
        ({"prompt": "both"}, "messages"),
        ({"messages": [{"role": "user", "content": "short"}]}, "messages"),
        ({"messages": [{"role": "user", "content": LONG * 30}]}, "messages"),
        ({"messages": None, "prompt": [-1]}, "prompt"),
        ({"messages": None, "prompt": [10**6] * 64}, "prompt[0]"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "s" * 2000}, "cache_salt"),
        (
            {"messages": None, "prompt": "x", "tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools",
        ),
        ({"model": "other"}, "model"),
        ({"model": None}, "model"),
    ],
)
def test_a_wrong_field_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
        hold(client, "wrong", **fields)
    assert caught.value.param == param
    assert listed(client) == []


@row("POST, GET and DELETE /v1/prefixes", "cache_salt")
def test_another_salt_does_not_find_it(client: openai.OpenAI) -> None:
    held = hold(client, "salted", cache_salt="one")
    body = {"model": MODEL, "messages": [system("salted"), {"role": "user", "content": "?"}], "max_tokens": 1}
    counts = {
        salt: cached(client.chat.completions.create(**body, extra_body={"cache_salt": salt}))  # type: ignore[call-overload]
        for salt in ("two", None, "one")
    }
    assert counts == {"two": 0, None: 0, "one": held["tokens"]}
    delete(client, held["id"])


@row("POST, GET and DELETE /v1/prefixes")
def test_earlier_turns_are_part_of_it(client: openai.OpenAI) -> None:
    """Whoever goes on with the same conversation finds all of it; another one, what they have in common."""
    said = [system("turns"), {"role": "user", "content": "When is it high? " * 8}]
    held = hold(client, "turns", messages=said, copies=1)
    more: Any = [*said, {"role": "assistant", "content": "At six."}, {"role": "user", "content": "And low?"}]
    went_on = client.chat.completions.create(model=MODEL, messages=more, max_tokens=1)
    assert cached(went_on) == held["tokens"]
    assert turn(client, "turns", "Something else?")[1] < held["tokens"]
    delete(client, held["id"])


@row("prompt_cache_key is a hint", "session header")
def test_hints_change_no_hit(server: HttpServer, client: openai.OpenAI) -> None:
    """Neither makes two prompts share a block, nor keeps two from sharing one."""
    held = hold(client, "hints")
    hints: list[tuple[str | None, str | None]] = [(None, None), ("k", None), (None, "s"), ("k2", "s2")]
    counts, others = [], []
    for key, session in hints:
        headers = {} if session is None else {"x-session-id": session}
        for name, found in (("hints", counts), (f"{key} {session}", others)):
            said: Any = [system(name), {"role": "user", "content": f"{key} {session}?"}]
            body = {"model": MODEL, "messages": said, "max_tokens": 1, "prompt_cache_key": key}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
            found.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert max(others) < BLOCK * 2
    assert counts == [held["tokens"]] * len(hints)
    delete(client, held["id"])
