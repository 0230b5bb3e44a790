"""Every field of the two request bodies that this server knows, and what it does with each: one table.

A field is *used*, *ignored* (accepted, without effect on the answer, documented so), or *refused* unless
its value is neutral, that is, asks for what happens anyway: a client must not believe that something
was done which was not. Fields outside the table are accepted and counted: client libraries add new
ones all the time. `docs/api.md` shows this table; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from router.errors import UnsupportedParameter


class Endpoint(StrEnum):
    CHAT = "chat/completions"
    COMPLETIONS = "completions"


class Use(StrEnum):
    USED = "used"
    IGNORED = "accepted, no effect"
    REFUSED = "refused unless neutral"


BOTH = (Endpoint.CHAT, Endpoint.COMPLETIONS)
CHAT = (Endpoint.CHAT,)
COMPLETIONS = (Endpoint.COMPLETIONS,)
MAX_PROMPTS = 64  # prompts in one completions body; each is a request of its own to a replica


@dataclass(frozen=True, slots=True)
class Field:
    """One row. `accepts` completes the sentence "'name' must be ..." in errors and in the documents."""

    name: str
    use: Use
    accepts: str
    endpoints: tuple[Endpoint, ...] = BOTH
    neutral: tuple[Any, ...] = ()  # of a refused field; `null` is always neutral


def _used(name: str, accepts: str, endpoints: tuple[Endpoint, ...] = BOTH) -> Field:
    return Field(name, Use.USED, accepts, endpoints)


def _ignored(name: str, endpoints: tuple[Endpoint, ...] = BOTH) -> Field:
    return Field(name, Use.IGNORED, "anything", endpoints)


def _refused(name: str, *neutral: Any, endpoints: tuple[Endpoint, ...] = BOTH) -> Field:
    shown = " or ".join(_json(value) for value in neutral) or "absent"
    return Field(name, Use.REFUSED, shown, endpoints, neutral)


def _json(value: Any) -> str:
    names = {True: "true", False: "false"}
    if isinstance(value, bool):
        return names[value]
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}": {_json(item)}' for key, item in value.items()) + "}"
    return str(value)


FIELDS: tuple[Field, ...] = (
    _used("model", "the name of a model this server has"),
    _used("messages", "a list of at least one message with a role and text content", CHAT),
    _used(
        "prompt",
        f"a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either",
        COMPLETIONS,
    ),
    _used("max_tokens", "an integer of at least 1, and fit the context together with the prompt"),
    _used(
        "max_completion_tokens",
        "an integer of at least 1, and fit the context together with the prompt",
        CHAT,
    ),
    _used("min_tokens", "an integer between 0 and max_tokens"),
    _used("temperature", "a number between 0 and 2"),
    _used("top_p", "a number above 0 and up to 1"),
    _used("top_k", "an integer of at least 1, or 0 or -1 for all tokens"),
    _used("seed", "an integer between -9223372036854775808 and 9223372036854775807"),
    _used("stop", "a non-empty string or a list of non-empty strings"),
    _used("stop_token_ids", "a list of token ids of this model"),
    _used("ignore_eos", "true or false"),
    _used("stream", "true or false"),
    _used(
        "stream_options",
        "an object with include_usage and continuous_usage_stats, and only with stream: true",
    ),
    _used("cache_salt", "a string of 1 to 1024 characters"),
    _ignored("user"),
    _ignored("metadata"),
    _ignored("safety_identifier"),
    _ignored("prompt_cache_key"),
    _ignored("prompt_cache_retention"),
    _ignored("service_tier"),
    _ignored("parallel_tool_calls", CHAT),  # without tools there is nothing to run in parallel
    _refused("n", 1),
    _refused("best_of", 1),
    _refused("echo", False),
    _refused("suffix", "", endpoints=COMPLETIONS),
    _refused("logprobs", False),
    _refused("top_logprobs", 0),
    _refused("prompt_logprobs"),
    _refused("presence_penalty", 0),
    _refused("frequency_penalty", 0),
    _refused("repetition_penalty", 1),
    _refused("length_penalty", 1),
    _refused("min_p", 0),
    _refused("typical_p", 1),
    _refused("logit_bias", {}),
    _refused("logits_processors", []),
    _refused("bad_words", []),
    _refused("allowed_token_ids"),
    _refused("use_beam_search", False),
    _refused("response_format", {"type": "text"}),
    _refused("structured_outputs"),
    _refused("guided_json"),
    _refused("guided_regex"),
    _refused("guided_choice"),
    _refused("guided_grammar"),
    _refused("tools", [], endpoints=CHAT),
    _refused("tool_choice", "none", "auto", endpoints=CHAT),
    _refused("functions", [], endpoints=CHAT),
    _refused("function_call", "none", "auto", endpoints=CHAT),
    _refused("modalities", ["text"], endpoints=CHAT),
    _refused("audio", endpoints=CHAT),
    _refused("prediction", endpoints=CHAT),
    _refused("web_search_options", endpoints=CHAT),
    _refused("reasoning_effort", endpoints=CHAT),
    _refused("verbosity", endpoints=CHAT),
    _refused("store", False),
    _refused("documents", [], endpoints=CHAT),
    _refused("chat_template", endpoints=CHAT),
    _refused("chat_template_kwargs", {}, endpoints=CHAT),
    _refused("add_generation_prompt", True, endpoints=CHAT),
    _refused("continue_final_message", False, endpoints=CHAT),
    _refused("include_stop_str_in_output", False),
    _refused("skip_special_tokens", True),
    _refused("spaces_between_special_tokens", True),
    _refused("truncate_prompt_tokens"),
    _refused("return_token_ids", False),
    _refused("prompt_embeds", endpoints=COMPLETIONS),
    _refused("priority", 0),
)


def table_of(endpoint: Endpoint) -> dict[str, Field]:
    """The endpoint's rows by field name."""
    return {field.name: field for field in FIELDS if endpoint in field.endpoints}


_TABLES = {endpoint: table_of(endpoint) for endpoint in Endpoint}


def accepted_text(endpoint: Endpoint, name: str) -> str | None:
    """What a used field accepts, as the end of a sentence; None for a field without a row."""
    row = _TABLES[endpoint].get(name)
    return row.accepts if row is not None and row.use is Use.USED else None


def refuse_unsupported(endpoint: Endpoint, body: Mapping[str, Any]) -> None:
    """Raises UnsupportedParameter for the first field that asks for something not implemented."""
    table = _TABLES[endpoint]
    for name, value in body.items():
        row = table.get(name)
        if row is None or row.use is not Use.REFUSED or value is None:
            continue
        if not any(_equal(value, neutral) for neutral in row.neutral):
            only = f" Leave it out or send {row.accepts}." if row.neutral else " Leave it out."
            raise UnsupportedParameter(name, f"'{name}' is not supported by this server.{only}")


def count_unknown(endpoint: Endpoint, names: Iterable[str]) -> int:
    """How many of a body's fields this server has never heard of."""
    table = _TABLES[endpoint]
    return sum(name not in table for name in names)


def _equal(value: Any, neutral: Any) -> bool:
    """JSON equality: `true` is not 1, while 1.0 is."""
    if isinstance(value, bool) is not isinstance(neutral, bool):
        return False
    return bool(value == neutral)
