"""The rows of API conformance: what clients in use rely on, and how much."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar


class Level(StrEnum):
    MUST = "MUST"  # a client or benchmark in use breaks or mis-measures without it
    SHOULD = "SHOULD"
    NICE = "NICE"


_MUST = (
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "GET /v1/models and /v1/models/{id}, with max_model_len",
    "GET /health and /live",
    "GET /metrics on the serving port",
    "prompt: a string",
    "prompt: token ids",
    "content as a list of text parts",
    "max_tokens and max_completion_tokens",
    "temperature",
    "top_p",
    "stop",
    "seed",
    "ignore_eos",
    "stream, [DONE], one finish_reason",
    "no chunk before the first token is computed",
    "stream_options.include_usage",
    "usage.prompt_tokens_details.cached_tokens",
    "cache_salt",
    "unknown fields are accepted and counted",
    "x-request-id in and out",
    "one error object on every path",
    "400 malformed JSON, deep nesting, bad UTF-8",
    "404 unknown model",
    "401 bad key",
    "413 body too large",
    "429 and 503 with Retry-After",
    "504 deadline",
    "499 client gone",
)
_SHOULD = (
    "POST /tokenize and /detokenize",
    "GET /version",
    "prompt: a list of strings",
    "prompt: a list of lists of token ids",
    "n > 1",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "stop_token_ids",
    "logprobs (completions)",
    "logprobs and top_logprobs (chat)",
    "stream_options.continuous_usage_stats",
    "prompt_cache_key is a hint",
    "session header",
    "routing headers behind a switch",
    "response_format",
    "tools and tool_choice",
    "POST, GET and DELETE /v1/prefixes",
)
_NICE = (
    "echo, suffix, best_of",
    "logit_bias",
    "structured_outputs",
    "priority",
    "/v1/embeddings and other routes: 404, not 500",
    "/openapi.json",
)
ROWS: dict[str, Level] = {
    **dict.fromkeys(_MUST, Level.MUST),
    **dict.fromkeys(_SHOULD, Level.SHOULD),
    **dict.fromkeys(_NICE, Level.NICE),
}

_Test = TypeVar("_Test", bound=Callable[..., object])


def row(*items: str) -> Callable[[_Test], _Test]:
    """Says which rows a test holds. Raises KeyError for a row that is not in the table."""
    for item in items:
        ROWS[item]

    def mark(test: _Test) -> _Test:
        test.__dict__["conformance_rows"] = items
        return test

    return mark
