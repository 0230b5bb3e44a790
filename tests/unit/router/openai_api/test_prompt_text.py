"""What a client wrote, as placement policies see it, and that it reaches them."""

from __future__ import annotations

from typing import Any

import pytest

from router.openai_api.messages import ChatMessage
from router.openai_api.prompt_text import ChatText, PlainText
from tests.fakes.http import MODEL, RouterUnderTest


def message(role: str, content: str) -> ChatMessage:
    return ChatMessage(role=role, content=content)


def test_a_chats_text_is_its_contents_and_its_head_the_users_first() -> None:
    chat = ChatText(
        [message("system", "Be kind."), message("user", "Hello"), message("user", "World")], session="s"
    )
    assert chat.text == "Be kind.\nHello\nWorld"
    assert chat.first_user_text == "Hello"
    assert chat.session == "s"


def test_a_chat_without_a_user_begins_where_it_begins() -> None:
    assert ChatText([message("system", "Be kind.")]).first_user_text == "Be kind."


def test_a_plain_prompt_is_all_the_users() -> None:
    assert PlainText("abc").first_user_text == PlainText("abc").text == "abc"


async def visited(router: RouterUnderTest, body: dict[str, Any], **headers: str) -> str:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = await router.client.post(path, json={"model": MODEL, "max_tokens": 2, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    return router.calls.requests[-1][0]


async def test_a_session_named_in_the_header_stays_on_its_replica() -> None:
    async with RouterUnderTest(num_replicas=4, policy="session_affinity") as router:
        homes = {}
        for session in ("s1", "s2", "s3", "s4", "s5", "s6"):
            visits = [
                await visited(router, {"prompt": f"{session} {turn}"}, **{"x-session-id": session})
                for turn in range(3)
            ]
            assert len(set(visits)) == 1
            homes[session] = visits[0]
        assert len(set(homes.values())) > 1


async def test_a_chat_is_hashed_by_how_its_user_began() -> None:
    async with RouterUnderTest(num_replicas=4, policy="chwbl") as router:

        def chat(system: str, user: str) -> dict[str, Any]:
            return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]}

        same_user = {await visited(router, chat(f"system {index}", "hello")) for index in range(8)}
        assert len(same_user) == 1
        other_users = {await visited(router, chat("system", f"hello {index}")) for index in range(16)}
        assert len(other_users) > 1


@pytest.mark.parametrize("policy", ["sglang_cache_aware", "ray_prefix_affinity"])
async def test_text_is_followed_to_where_it_went(policy: str) -> None:
    async with RouterUnderTest(num_replicas=3, policy=policy) as router:
        first = await visited(router, {"prompt": "one prompt of a certain length, asked"})
        await visited(router, {"prompt": "another, of nearly the same length"})
        for ending in ("again", "and again"):
            again = {"prompt": f"one prompt of a certain length, asked {ending}"}
            assert await visited(router, again) == first


@pytest.mark.parametrize("policy", ["sglang_cache_aware", "ray_prefix_affinity", "chwbl"])
async def test_token_ids_are_placed_by_their_blocks(policy: str) -> None:
    async with RouterUnderTest(num_replicas=3, policy=policy) as router:
        prompt = list(range(40))
        first = await visited(router, {"prompt": prompt})
        assert await visited(router, {"prompt": [*prompt, 50]}) == first
