"""What frameworks send, recorded from them, is answered, and none of its fields is one nobody knows here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.openai_api.fields import Endpoint, count_unknown
from tests.fakes.http import MODEL, RouterUnderTest, events_of
from tests.fakes.tokenizers import HERMES, a_tokenizer

RECORDED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("client_bodies.json").read_text())


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: str(recorded["client"]))
async def test_what_a_framework_sends_is_answered(recorded: dict[str, Any]) -> None:
    body = {**recorded["body"], "model": MODEL}
    assert count_unknown(Endpoint.CHAT, body) == 0
    router = RouterUnderTest(tokenizer=a_tokenizer("bytes", template=HERMES), max_model_len=8192)
    async with router:
        answer = await router.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    chunks = (
        [json.loads(each) for each in events_of(answer.content)[:-1]]
        if body.get("stream")
        else [answer.json()]
    )
    assert any(choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])
