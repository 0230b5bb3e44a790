"""What a large body takes is done on a prompt's thread, in its tenant's turn, and not in the event loop."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from router.limits import Limits
from router.openai_api import answer_form, app, messages, prefix_routes
from router.openai_api.body_room import BodyPlace, BodyRoom
from router.openai_api.handling import Received
from router.openai_api.schema import CompletionBody, parse_completion
from tests.fakes.http import MODEL, RouterUnderTest, error_of
from tests.fakes.tools import a_router

MANY = 50_000
HELLO = {"role": "user", "content": "hello"}


def _called(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [HELLO, {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}]


class _Threads:
    """Where something was called, by the threads' names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.names: list[str] = []

    def watch(self, owner: object, name: str) -> None:
        plain: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.names.append(threading.current_thread().name.split("_")[0])
            return plain(*args, **kwargs)

        self._monkeypatch.setattr(owner, name, watched)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> _Threads:
    return _Threads(monkeypatch)


HERE = threading.current_thread().name


@pytest.mark.parametrize(
    ("owner", "parse", "path", "body"),
    [
        (
            app,
            "parse_chat",
            "/v1/chat/completions",
            lambda n: {"messages": _called(json.dumps({"a": [1] * n}))},
        ),
        (app, "parse_chat", "/v1/chat/completions", lambda n: {"messages": _called({"a": [[]] * n})}),
        (
            app,
            "parse_chat",
            "/v1/chat/completions",
            lambda n: {"messages": [HELLO], "allowed_token_ids": [1] * n},
        ),
        (
            app,
            "parse_chat",
            "/v1/chat/completions",
            lambda n: {"messages": [HELLO], "guided_grammar": 'root ::= "a"' + "\n" * (n // 10)},
        ),
        (
            app,
            "parse_chat",
            "/v1/chat/completions",
            lambda n: {"messages": [HELLO], "guided_json": {"enum": [1] * (n // 10)}},
        ),
        (app, "parse_completion", "/v1/completions", lambda n: {"prompt": [1] * n}),
        (app, "parse_completion", "/v1/completions", lambda n: {"prompt": "a", "allowed_token_ids": [1] * n}),
        (app, "parse_tokenize", "/tokenize", lambda n: {"messages": _called({"a": [1] * n})}),
        (app, "parse_detokenize", "/detokenize", lambda n: {"tokens": [65] * n}),
        (prefix_routes, "parse_prefix", "/v1/prefixes", lambda n: {"prompt": [1] * n}),
    ],
)
async def test_large_bodies_are_checked_on_a_prompts_thread(
    router: RouterUnderTest,
    threads: _Threads,
    owner: object,
    parse: str,
    path: str,
    body: Callable[[int], dict[str, Any]],
) -> None:
    """One of 4 MiB kept everybody else waiting for a second and more."""
    threads.watch(owner, parse)
    for num, where in ((10, HERE), (MANY, "prompt")):
        await router.client.post(path, json={"model": MODEL, **body(num)})
        assert threads.names.pop() == where


@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_long_schemas_of_functions_become_a_structure_on_a_prompts_thread(
    threads: _Threads, choice: str
) -> None:
    """A hundred of them kept everybody else waiting for half a second."""
    for name in ("arguments_of", "calls_of"):
        threads.watch(answer_form, name)
    async with a_router("no call") as router:
        for num, where in ((10, HERE), (MANY, "prompt")):
            parameters = {"properties": {"place": {"type": "string", "description": "x" * num}}}
            function = {"name": "weather", "parameters": parameters, "strict": True}
            await router.chat(tools=[{"type": "function", "function": function}], tool_choice=choice)
            assert threads.names == [where, where]
            threads.names.clear()


async def test_a_chat_of_many_messages_is_rendered_on_a_prompts_thread(threads: _Threads) -> None:
    """However short: a template goes through each."""
    async with a_router("hi") as router:
        threads.watch(router.encoder, "render")
        for num, where in ((10, HERE), (300, "prompt")):
            await router.client.post("/v1/chat/completions", json={"model": MODEL, "messages": [HELLO] * num})
            assert threads.names.pop() == where


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 4 * MANY}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 4 * MANY}] * 2}),
    ],
)
async def test_a_long_text_takes_no_turn_before_its_tokenization(
    router: RouterUnderTest, threads: _Threads, path: str, body: dict[str, Any]
) -> None:
    """Nothing in it is checked; it would stand in line twice."""
    for name in ("parse_chat", "parse_completion"):
        threads.watch(app, name)
    await router.client.post(path, json={"model": MODEL, **body})
    assert threads.names == [HERE]


@pytest.mark.parametrize("fields", [{}, {"messages": 5}, {"messages": [5, {"content": 5}]}, {"prompt": [5]}])
def test_what_is_no_text_is_to_be_checked(fields: dict[str, Any]) -> None:
    place = BodyPlace(BodyRoom(1, 1, None), "")
    assert Received(fields, 100, 0.0, place).num_checked_bytes(Limits()) == 100
    assert Received({**fields, "prompt": "x" * 40}, 100, 0.0, place).num_checked_bytes(Limits()) == 60


async def test_ids_and_their_spelling_are_looked_up_and_written_on_a_thread(
    router: RouterUnderTest, threads: _Threads
) -> None:
    threads.watch(router.tokenizer, "convert_ids_to_tokens")
    threads.watch(router.tokenizer, "decode")
    for num, where in ((10, HERE), (MANY, "prompt")):
        asked = {"prompt": "é" * num, "return_token_strs": True}
        answer = (await router.client.post("/tokenize", json=asked)).json()
        assert set(threads.names) == {where}
        assert answer["count"] == 2 * num
        assert answer["tokens"] == [195, 169] * num
        assert answer["token_strs"] == [chr(0x100 + 195), chr(0x100 + 169)] * num
        threads.names.clear()
        text = (await router.client.post("/detokenize", json={"tokens": answer["tokens"]})).json()["prompt"]
        assert text == "é" * num
        assert threads.names == [where]
        threads.names.clear()


async def test_errors_come_from_the_thread_as_from_anywhere(router: RouterUnderTest) -> None:
    for path, body, param in (
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": [1] * MANY}, "allowed_token_ids"),
        ("/v1/completions", {"prompt": [1] * MANY + [-1]}, "prompt"),
        ("/detokenize", {"tokens": [1] * MANY + [256]}, f"tokens[{MANY}]"),
    ):
        answer = await router.client.post(path, json={"model": MODEL, **body})
        assert (answer.status_code, error_of(answer)["param"]) == (400, param)


async def test_checking_is_a_part_of_the_requests_time(
    router: RouterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for its turn as long as a prompt may: after that nobody wants the answer any more."""

    def slowly(*args: Any) -> CompletionBody:
        time.sleep(0.05)
        return parse_completion(*args)

    monkeypatch.setattr(app, "parse_completion", slowly)
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
    answers = [
        await router.client.post("/v1/completions", json=body, headers={"x-warmpath-timeout": timeout})
        for timeout in ("0.02", "30")
    ]
    assert [answer.status_code for answer in answers] == [504, 200]
    [(_, request)] = router.calls.requests
    assert request.deadline_s is not None
    assert request.deadline_s <= 30 - 0.05


async def test_others_run_between_the_prompts_of_a_batch(
    router: RouterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is short enough for the event loop, and there may be 64."""
    num_turns, seen, plain = 0, list[int](), router.encoder.ids

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(num_turns)
        return plain(*args, **kwargs)

    async def others() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(router.encoder, "ids", watched)
    running = asyncio.create_task(others())
    await router.complete([[1], [2], [3]])
    running.cancel()
    assert len(set(seen)) == 3


def test_arguments_of_very_many_parts_are_not_searched_for_garbage() -> None:
    """As bodies are not: it took a second."""
    collections = 0

    def collected(_phase: str, _info: dict[str, int]) -> None:
        nonlocal collections
        collections += 1

    text = '{"half": "\\ud800", "a": [' + "[]," * 200_000 + "1]}"
    gc.callbacks.append(collected)
    try:
        parsed = messages._parsed(text)
    finally:
        gc.callbacks.remove(collected)
    assert isinstance(parsed, dict)
    assert (parsed["half"], len(parsed["a"])) == ("?", 200_001)
    assert collections < 10
    assert gc.isenabled()


@pytest.mark.parametrize(
    "escaped",
    [
        *(r"\ud800", r"\uDFFF", r"\ud800\ud800", r"\udc00\ud800", r"\ud83d\ude00", r"\ud83d\ude00\ud83d"),
        *(r"\\ud800", r"\\\ud800", r"\\\\ud800\ud800", r"\n\udead\t", r"\u00e9\ud800A", r"\ud800\\ude00"),
    ],
)
def test_half_pairs_are_question_marks_and_nothing_else_is(escaped: str) -> None:
    text = f'{{"a{escaped}": "{escaped}\\ud9ab"}}'
    whole = json.dumps(json.loads(text), ensure_ascii=False).encode(errors="replace")
    assert messages._parsed(text) == json.loads(whole)
