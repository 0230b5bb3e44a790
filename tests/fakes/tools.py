"""A function to call, and a Router whose model calls it."""

from __future__ import annotations

from typing import Any

from cache.messages import FinishReason
from tests.fakes.http import RouterUnderTest
from tests.fakes.tokenizers import HERMES, a_tokenizer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


def a_router(
    *texts: str, template: str = HERMES, finish: FinishReason = FinishReason.STOP
) -> RouterUnderTest:
    """A Router of a model with this template, that answers these texts, one delta each."""
    router = RouterUnderTest(tokenizer=a_tokenizer("bytes", template=template), max_model_len=4096)
    router.say(*texts, finish=finish)
    return router
