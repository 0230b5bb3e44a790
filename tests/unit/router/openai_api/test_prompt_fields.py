"""Fields that change a prompt's ids: what a tokenizer puts around a text, and who speaks in a chat."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.fakes.http import MODEL, RouterUnderTest, error_of
from tests.fakes.tokenizers import CHATML, a_tokenizer

CLS, SEP = 1, 2
NAMED = (
    "{% for message in messages %}<|im_start|>{{ message.name or message.role }} {{ message.content }}"
    "{% endfor %}"
)


def prompt_of(router: RouterUnderTest) -> list[int]:
    return list(router.calls.requests[-1][1].token_ids)


def a_router(**options: Any) -> RouterUnderTest:
    return RouterUnderTest(tokenizer=a_tokenizer("wordpiece", **options))


async def test_a_completion_goes_without_special_tokens_where_it_says_so() -> None:
    """Both ways in turn: the segments that are kept are those of the text alone, whatever is around it."""
    async with a_router() as router:
        for salt in (None, "s"):
            for _ in range(2):
                await router.complete("hello word", cache_salt=salt)
                framed = prompt_of(router)
                answer = (
                    await router.complete("hello word", cache_salt=salt, add_special_tokens=False)
                ).json()
                bare = prompt_of(router)
                assert framed == [CLS, *bare, SEP]
                assert answer["usage"]["prompt_tokens"] == len(bare)
        statistics = router.parts.service._encoder.statistics()
        assert statistics is not None
        assert statistics.reused_tokens > 0


@pytest.mark.parametrize("adds", [True, False])
async def test_a_texts_ids_are_those_of_tokenize_either_way(adds: bool) -> None:
    async with a_router() as router:
        body = {"prompt": "hello word", "add_special_tokens": adds}
        ids = (await router.client.post("/tokenize", json=body)).json()["tokens"]
        await router.complete("hello word", add_special_tokens=adds)
        assert prompt_of(router) == ids


async def test_token_ids_are_taken_as_they_are_and_an_echo_repeats_the_text() -> None:
    async with a_router() as router:
        await router.complete([[5, 6]], add_special_tokens=True)
        assert prompt_of(router) == [5, 6]
        answer = (await router.complete("hello", add_special_tokens=False, echo=True)).json()
        assert answer["choices"][0]["text"].startswith("hello")


async def test_an_empty_text_without_special_tokens_is_refused_by_name() -> None:
    async with a_router() as router:
        assert (await router.complete("")).status_code == 200
        answer = await router.complete("", add_special_tokens=False)
        assert (answer.status_code, error_of(answer)["param"]) == (400, "prompt")


async def test_a_chats_special_tokens_are_its_templates(router: RouterUnderTest) -> None:
    assert (await router.chat(add_special_tokens=False)).status_code == 200
    answer = await router.chat(add_special_tokens=True)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "add_special_tokens")
    assert error_of(answer)["code"] == "unsupported_parameter"


async def test_a_speakers_name_is_read_where_the_template_reads_it() -> None:
    async def ask(router: RouterUnderTest, **message: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hello", **message}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 2}
        return await router.client.post("/v1/chat/completions", json=body)

    for template, is_read in ((NAMED, True), (NAMED.replace("message.name or ", ""), False)):
        async with a_router(template=template) as router:
            await ask(router)
            plain = prompt_of(router)
            await ask(router, name="don")
            assert (prompt_of(router) != plain) is is_read


async def test_an_assistants_reasoning_is_read_where_the_template_reads_it() -> None:
    template = CHATML.replace("{{ message.content }}", "{{ message.reasoning_content }}{{ message.content }}")
    async with RouterUnderTest(tokenizer=a_tokenizer("bytes", template=template)) as router:
        messages = [{"role": "assistant", "content": "b", "reasoning": "a"}, {"role": "user", "content": "c"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 2}
        assert (await router.client.post("/v1/chat/completions", json=body)).status_code == 200
        assert "assistant\nab<|im_end|>" in router.tokenizer.decode(prompt_of(router))
