"""/tokenize and /detokenize: the ids a request would be placed by, and back."""

from __future__ import annotations

from typing import Any

import pytest

from router.limits import Limits
from tests.fakes.http import MAX_MODEL_LEN, MODEL, RouterUnderTest
from tests.fakes.tokenizers import HERMES, a_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather at a place."}}


async def post(router: RouterUnderTest, path: str, **body: Any) -> Any:
    answer = await router.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_texts_ids_are_those_of_a_completion(router: RouterUnderTest) -> None:
    answer = await post(router, "/tokenize", model=MODEL, prompt="hé")
    await router.complete("hé")
    sent = router.calls.requests[0][1]
    assert answer["tokens"] == list(sent.token_ids)
    assert answer == {
        "count": 3,
        "max_model_len": MAX_MODEL_LEN,
        "tokens": [104, 195, 169],
        "token_strs": None,
    }


async def test_a_chats_ids_are_those_of_a_chat(router: RouterUnderTest) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    answer = await post(router, "/tokenize", messages=messages)
    await router.chat("hello")
    assert answer["tokens"] == list(router.calls.requests[0][1].token_ids)


async def test_a_chats_tools_count_as_the_chat_counts_them() -> None:
    tokenizer = a_tokenizer("bytes", template=HERMES)
    async with RouterUnderTest(tokenizer=tokenizer, max_model_len=4096) as router:
        counts = []
        for tools in [], [WEATHER], [WEATHER, {**WEATHER, "function": {"name": "sea"}}]:
            answer = await post(router, "/tokenize", messages=HELLO, tools=tools)
            chat = (await router.chat("hello", tools=tools)).json()
            assert answer["tokens"] == list(router.calls.requests[-1][1].token_ids)
            assert answer["count"] == chat["usage"]["prompt_tokens"]
            counts.append(answer["count"])
        assert counts == sorted(set(counts))


async def test_a_chat_may_end_before_the_turn_of_the_assistant() -> None:
    tokenizer = a_tokenizer("bytes", template=HERMES)
    async with RouterUnderTest(tokenizer=tokenizer, max_model_len=4096) as router:
        whole = await post(router, "/tokenize", messages=HELLO)
        ends_before = await post(router, "/tokenize", messages=HELLO, add_generation_prompt=False)
        turn = whole["tokens"][ends_before["count"] :]
        assert whole["tokens"] == [*ends_before["tokens"], *turn]
        assert tokenizer.decode(turn) == "<|im_start|>assistant\n"


async def test_spelling_is_given_if_asked_for(router: RouterUnderTest) -> None:
    answer = await post(router, "/tokenize", prompt="ab", return_token_strs=True)
    assert answer["token_strs"] == [chr(0x100 + 97), chr(0x100 + 98)]


async def test_ids_become_their_text_again(router: RouterUnderTest) -> None:
    ids = (await post(router, "/tokenize", prompt="grüße"))["tokens"]
    assert await post(router, "/detokenize", model=MODEL, tokens=ids) == {"prompt": "grüße"}
    assert await post(router, "/detokenize", tokens=[]) == {"prompt": ""}


async def test_without_replicas_the_length_limit_is_not_known(router: RouterUnderTest) -> None:
    router.parts.routing.update_replicas({})
    assert (await post(router, "/tokenize", prompt="a"))["max_model_len"] is None


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, 400, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ("/tokenize", {"prompt": "a", "tools": [WEATHER]}, 400, "tools"),
        ("/tokenize", {"messages": HELLO, "tools": [{}]}, 400, "tools[0]"),
        ("/tokenize", {"messages": HELLO, "tools": [WEATHER]}, 400, "tools"),  # the template has no place
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": HELLO, "chat_template": "x"}, 400, "chat_template"),
        ("/tokenize", {"prompt": "a", "cache_salt": "x" * 1025}, 400, "cache_salt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [256]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 10**30]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_what_is_wrong_is_named(
    router: RouterUnderTest, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await router.client.post(path, json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


async def test_unknown_fields_are_accepted_and_requests_counted(router: RouterUnderTest) -> None:
    await post(router, "/tokenize", prompt="a", frobnicate=1)
    await post(router, "/detokenize", tokens=[97], frobnicate=1)
    assert router.metric("warmpath_unknown_fields_total") == 2
    for endpoint in ("tokenize", "detokenize"):
        assert router.metric("warmpath_requests_total", endpoint=endpoint, outcome="ok") == 1


async def test_the_limits_hold_here_too() -> None:
    async with RouterUnderTest(limits=Limits(max_body_bytes=1024, max_messages=1)) as router:
        large = await router.client.post("/tokenize", json={"prompt": "x" * 2000})
        many = await router.client.post(
            "/tokenize", json={"messages": [{"role": "user", "content": "x"}] * 2}
        )
        assert (large.status_code, many.status_code) == (413, 400)
