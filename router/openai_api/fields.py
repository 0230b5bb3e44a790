"""Every field that the generating endpoints know, and what this server does with it: one table.

A field is *used*, *ignored* (accepted, without effect on the answer, documented so), or *refused* unless
its value is neutral, that is, asks for what happens anyway: a client must not believe that something
was done which was not. A refused field is checked all the same, so that a value which makes no sense is
told apart from one that this server cannot honour. Fields outside the table are accepted and counted:
client libraries add new ones all the time. `docs/api.md` shows this table; a test holds the two together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cache.priority import MAX_PRIORITY, MIN_PRIORITY
from router.errors import InvalidField, UnsupportedParameter
from router.sampling import ACCEPTED


class Endpoint(StrEnum):
    CHAT = "chat/completions"
    COMPLETIONS = "completions"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    PREFIXES = "prefixes"


class Use(StrEnum):
    USED = "used"
    IGNORED = "accepted, no effect"
    REFUSED = "refused unless neutral"


BOTH = (Endpoint.CHAT, Endpoint.COMPLETIONS)
CHAT = (Endpoint.CHAT,)
COMPLETIONS = (Endpoint.COMPLETIONS,)


@dataclass(frozen=True, slots=True)
class Domain:
    """The values a refused field has in the API. `text` completes "'name' must be ..."."""

    text: str
    contains: Callable[[Any], bool]


def _integer(low: int, high: int | None = None) -> Domain:
    text = f"an integer of at least {low}" if high is None else f"an integer between {low} and {high}"
    return Domain(text, lambda value: _is_integer(value) and value >= low and (high is None or value <= high))


def _number(low: float, high: float) -> Domain:
    def contains(value: Any) -> bool:
        return _is_number(value) and low <= value <= high

    return Domain(f"a number between {low:g} and {high:g}", contains)


def _one_of(kind: type | tuple[type, ...], text: str) -> Domain:
    return Domain(text, lambda value: isinstance(value, kind))


def _list_of(contains: Callable[[Any], bool], text: str) -> Domain:
    return Domain(text, lambda value: isinstance(value, list) and all(map(contains, value)))


def _is_integer(value: Any) -> bool:
    """JSON's 1.0 is an integer too, and `true` is none."""
    return _is_number(value) and value == int(value)


def _is_number(value: Any) -> bool:
    """Integers of any size are numbers: of those beyond floats' range `isfinite` makes an OverflowError."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


_BOOLEAN = _one_of(bool, "true or false")
_STRING = _one_of(str, "a string")
_OBJECT = _one_of(dict, "an object")
_LIST = _one_of(list, "a list")
_STRINGS = _list_of(lambda value: isinstance(value, str), "a list of strings")
_ANY = Domain("anything", lambda _value: True)
_VERBOSITY = Domain('"low", "medium" or "high"', lambda value: value in ("low", "medium", "high"))
_FINITE = Domain("a number", _is_number)


@dataclass(frozen=True, slots=True)
class Field:
    """One row. `accepts` completes the sentence "'name' must be ..." in errors and in the documents."""

    name: str
    use: Use
    accepts: str
    endpoints: tuple[Endpoint, ...] = BOTH
    neutral: tuple[Any, ...] = ()  # of a refused field; `null` is always neutral
    domain: Domain = _ANY  # of a refused field: what the API defines, whether honoured or not


def _used(name: str, accepts: str, endpoints: tuple[Endpoint, ...] = BOTH) -> Field:
    return Field(name, Use.USED, accepts, endpoints)


def _ignored(name: str, endpoints: tuple[Endpoint, ...] = BOTH) -> Field:
    return Field(name, Use.IGNORED, "anything", endpoints)


def _refused(
    name: str, *neutral: Any, domain: Domain = _ANY, endpoints: tuple[Endpoint, ...] = BOTH
) -> Field:
    shown = " or ".join(map(json.dumps, neutral)) or "absent"
    return Field(name, Use.REFUSED, shown, endpoints, neutral, domain)


FIELDS: tuple[Field, ...] = (
    _used("model", "the name of a model this server has"),
    _used("messages", "a list of at least one message with a role and text content", CHAT),
    _used(
        "prompt",
        "a string, a list of token ids, or a list of either",
        COMPLETIONS,
    ),
    _used("max_tokens", "an integer of at least 1, and fit the context together with the prompt", CHAT),
    _used(
        "max_tokens",
        "an integer of at least 1, or 0 with echo, and fit the context together with the prompt",
        COMPLETIONS,
    ),
    _used(
        "max_completion_tokens",
        "an integer of at least 1, and fit the context together with the prompt",
        CHAT,
    ),
    _used("min_tokens", "an integer between 0 and max_tokens"),
    *(_used(name, accepts) for name, accepts in ACCEPTED.items()),
    _used("logit_bias", "an object of token ids of this model with a number between -100 and 100 each"),
    _used("logprobs", "true or false", CHAT),
    _used("top_logprobs", "an integer between 0 and 20, and only with logprobs: true", CHAT),
    _used("logprobs", "an integer between 0 and 20", COMPLETIONS),
    _used("echo", "true or false", COMPLETIONS),
    _used("add_special_tokens", "true or false", COMPLETIONS),
    _used("n", "an integer of at least 1"),
    _used("best_of", "absent or the same as n"),
    _used("seed", "an integer between -9223372036854775808 and 9223372036854775807"),
    _used("stop", "a non-empty string or a list of non-empty strings"),
    _used("stop_token_ids", "a list of token ids of this model"),
    _used("ignore_eos", "true or false"),
    _used("stream", "true or false"),
    _used(
        "stream_options",
        "an object with include_usage and continuous_usage_stats, and only with stream: true",
    ),
    _used("cache_salt", "a non-empty string"),
    _used("prompt_cache_key", "a string"),
    _used("priority", f"an integer between {MIN_PRIORITY} and {MAX_PRIORITY}, and none below the API key's"),
    _used("tools", "a list of functions with a name each, which the model's chat template can render", CHAT),
    _used(
        "tool_choice",
        '"none", "auto", "required", or an object that names a function or the functions allowed',
        CHAT,
    ),
    _used("parallel_tool_calls", "true or false", CHAT),
    _used("chat_template_kwargs", "an object of variables of the model's chat template", CHAT),
    _used(
        "reasoning_effort",
        "one of none, minimal, low, medium, high, xhigh, where the model's chat template has this variable",
        CHAT,
    ),
    _used("response_format", 'an object whose type is "text", "json_object" or "json_schema"'),
    _used("structured_outputs", "an object with exactly one of json, regex, choice, grammar, json_object"),
    _used("guided_json", "a JSON schema, or a string that holds one"),
    _used("guided_regex", "a regular expression: a non-empty string"),
    _used("guided_choice", "a list of at least one non-empty string"),
    _used("guided_grammar", "a grammar, in Lark's notation or as GBNF: a non-empty string"),
    _ignored("user"),
    _ignored("metadata"),
    _ignored("safety_identifier"),
    _ignored("prompt_cache_retention"),
    _ignored("prompt_cache_options", CHAT),
    _ignored("service_tier"),
    _ignored("request_id"),
    _ignored("session_id"),
    _ignored("stream_interval"),
    _ignored("truncation_side"),  # of what `truncate_prompt_tokens` cuts
    _ignored("guided_decoding_backend"),
    _refused("echo", False, domain=_BOOLEAN, endpoints=CHAT),
    _refused("add_special_tokens", False, domain=_BOOLEAN, endpoints=CHAT),  # templates write their own
    _refused("suffix", "", domain=_STRING, endpoints=COMPLETIONS),
    _refused("top_logprobs", 0, domain=_integer(0, 20), endpoints=COMPLETIONS),
    _refused("prompt_logprobs", domain=_integer(-1)),
    _refused("logprob_token_ids", domain=_list_of(_is_integer, "a list of token ids")),
    _refused("length_penalty", 1, domain=_FINITE),
    _refused("typical_p", 1, domain=_number(0, 1)),
    _refused("logits_processors", [], domain=_LIST),
    _refused("bad_words", [], domain=_STRINGS),
    _refused("allowed_token_ids", domain=_list_of(_is_integer, "a list of token ids")),
    _refused("use_beam_search", False, domain=_BOOLEAN),
    _refused("repetition_detection", domain=_OBJECT),
    _refused("thinking_token_budget", -1, domain=_integer(-1)),
    _refused("watermarking", False, domain=_BOOLEAN),
    _refused("functions", [], domain=_LIST, endpoints=CHAT),
    _refused("function_call", "none", "auto", endpoints=CHAT),
    _refused("modalities", ["text"], domain=_STRINGS, endpoints=CHAT),
    _refused("audio", domain=_OBJECT, endpoints=CHAT),
    _refused("prediction", domain=_OBJECT, endpoints=CHAT),
    _refused("moderation", domain=_OBJECT, endpoints=CHAT),
    _refused("web_search_options", domain=_OBJECT, endpoints=CHAT),
    _refused("verbosity", "medium", domain=_VERBOSITY, endpoints=CHAT),
    _refused("store", False, domain=_BOOLEAN),
    _refused("documents", [], domain=_LIST, endpoints=CHAT),
    _refused("chat_template", domain=_STRING, endpoints=CHAT),
    _refused("add_generation_prompt", True, domain=_BOOLEAN, endpoints=CHAT),
    _refused("continue_final_message", False, domain=_BOOLEAN, endpoints=CHAT),
    _refused("include_stop_str_in_output", False, domain=_BOOLEAN),
    _refused("skip_special_tokens", True, domain=_BOOLEAN),
    _refused("spaces_between_special_tokens", True, domain=_BOOLEAN),
    _refused("truncate_prompt_tokens", domain=_integer(-1)),
    _refused("return_prompt_text", False, domain=_BOOLEAN, endpoints=CHAT),
    _refused("return_token_ids", False, domain=_BOOLEAN),
    _refused("return_tokens_as_token_ids", False, domain=_BOOLEAN),
    _refused("include_reasoning", True, domain=_BOOLEAN, endpoints=CHAT),
    _refused("mm_processor_kwargs", {}, domain=_OBJECT, endpoints=CHAT),
    _refused("guided_whitespace_pattern", domain=_STRING),
    _refused("structural_tag", domain=_STRING),
    # Of other servers. Ignored, any text would be the answer; here it is `structured_outputs`.
    _refused("regex", "", domain=_STRING),
    _refused("ebnf", "", domain=_STRING),
    _refused("grammar", "", domain=_STRING),
    _refused("json_schema"),  # an object, or a string that holds one
    _refused("kv_transfer_params", domain=_OBJECT),
    _refused("ec_transfer_params", domain=_OBJECT),
    _refused("vllm_xargs", {}, domain=_OBJECT),
    _refused("prompt_embeds", endpoints=COMPLETIONS),
)


STREAM_OPTIONS = frozenset({"include_usage", "continuous_usage_stats", "include_obfuscation"})
"""The keys of `stream_options` that the API or vLLM define."""


def table_of(endpoint: Endpoint) -> dict[str, Field]:
    """The endpoint's rows by field name."""
    return {field.name: field for field in FIELDS if endpoint in field.endpoints}


_TABLES = {endpoint: table_of(endpoint) for endpoint in Endpoint}


def accepted_text(endpoint: Endpoint, name: str) -> str | None:
    """What a used field accepts, as the end of a sentence; None for a field without a row."""
    row = _TABLES[endpoint].get(name)
    return row.accepts if row is not None and row.use is Use.USED else None


def refuse_unsupported(endpoint: Endpoint, body: Mapping[str, Any]) -> None:
    """Raises UnsupportedParameter for the first field that asks for something not implemented.

    Raises InvalidField instead where the value is none that the API defines.
    """
    table = _TABLES[endpoint]
    for name, value in body.items():
        row = table.get(name)
        if row is None or row.use is not Use.REFUSED or value is None:
            continue
        if not any(_equal(value, neutral) for neutral in row.neutral):
            if not row.domain.contains(value):
                raise InvalidField(name, f"'{name}' must be {row.domain.text}.")
            only = f" Leave it out or send {row.accepts}." if row.neutral else " Leave it out."
            raise UnsupportedParameter(name, f"'{name}' is not supported by this server.{only}")


def count_unknown(endpoint: Endpoint, body: Mapping[str, Any]) -> int:
    """How many of a body's fields, and of its `stream_options`, this server has never heard of."""
    options = body.get("stream_options")
    nested = options if isinstance(options, dict) else {}
    return num_beyond(body, _TABLES[endpoint]) + num_beyond(nested, STREAM_OPTIONS)


def num_beyond(body: Mapping[str, Any], known: Collection[str]) -> int:
    """How many of its fields are not among these. O(the known): a body may have 300,000 others."""
    return len(body) - sum(name in body for name in known)


def _equal(value: Any, neutral: Any) -> bool:
    """JSON equality: `true` is not 1, while 1.0 is."""
    if isinstance(value, bool) is not isinstance(neutral, bool):
        return False
    return bool(value == neutral)
