"""The two request bodies as checked values. A value that exists can be generated from.

Knows the API's fields and their ranges; knows neither tokenizer nor replicas: whatever needs those
(unknown model, context length, token ids beyond the vocabulary) is checked in `service.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import from_json

from cache.structure import Structure
from router.errors import InvalidField, UnsupportedParameter
from router.limits import Limits
from router.openai_api.fields import Endpoint, accepted_text, refuse_unsupported
from router.openai_api.sampling_fields import Logprobs, SamplingFields, false_is_none
from router.openai_api.structures import (
    to_format,
    to_guided_choice,
    to_guided_grammar,
    to_guided_json,
    to_guided_regex,
    to_structure,
)

DEFAULT_COMPLETION_TOKENS = 16  # the API's own default for /v1/completions
INT32_MAX = (1 << 31) - 1

# The API treats `developer` as the newer name of `system`; chat templates know the old one.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_TOOL_ROLE = "tool"
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TOOL_CHOICES = ("none", "auto")


class CalledFunction(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str
    arguments: dict[str, Any]  # sent as JSON in a string; templates want it as the object it is


class PastCall(BaseModel):
    """A call that the assistant made in an earlier turn."""

    model_config = ConfigDict(frozen=True)

    id: str | None
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """As chat templates read calls."""
        named = {} if self.id is None else {"id": self.id}
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {**named, "type": "function", "function": function}


class ChatMessage(BaseModel):
    """One message, its content joined to plain text."""

    model_config = ConfigDict(frozen=True)

    role: str
    content: str  # "" where a message is nothing but calls
    tool_calls: tuple[PastCall, ...] = ()  # of an assistant
    tool_call_id: str | None = None  # of a tool's answer

    def for_template(self) -> dict[str, Any]:
        """As chat templates read messages."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class TextPrompt(BaseModel):
    model_config = ConfigDict(frozen=True)

    text: str


class TokenPrompt(BaseModel):
    model_config = ConfigDict(frozen=True)

    token_ids: tuple[int, ...]


Prompt = TextPrompt | TokenPrompt


def to_messages(value: object, info: ValidationInfo) -> tuple[ChatMessage, ...]:
    """The field `messages`, checked. Raises InvalidField or UnsupportedParameter."""
    limit = _limits(info).max_messages
    if not isinstance(value, list) or not 1 <= len(value) <= limit:
        raise InvalidField("messages", f"'messages' must be a list of 1 to {limit} messages.")
    return tuple(_to_message(item, f"messages[{index}]") for index, item in enumerate(value))


def _to_message(value: object, at: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise InvalidField(at, f"'{at}' must be an object with 'role' and 'content'.")
    role = value.get("role")
    if role == "function":
        raise UnsupportedParameter(f"{at}.role", f'\'{at}.role\': "function" is not supported: use "tool".')
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidField(f"{at}.role", f"'{at}.role' must be one of {', '.join(_ROLES)}.")
    for name in ("function_call", "audio"):
        if value.get(name):
            raise UnsupportedParameter(f"{at}.{name}", f"'{at}.{name}' is not supported by this server.")
    calls = _to_calls(value.get("tool_calls"), role, f"{at}.tool_calls")
    content = value.get("content")
    return ChatMessage.model_construct(
        role=_ROLES[role],
        content="" if content is None and calls else _to_text(content, f"{at}.content"),
        tool_calls=calls,
        tool_call_id=_to_call_id(value.get("tool_call_id"), role, f"{at}.tool_call_id"),
    )


def _to_call_id(value: object, role: str, at: str) -> str | None:
    if value is None or role != _TOOL_ROLE:
        return None
    if not isinstance(value, str):
        raise InvalidField(at, f"'{at}' must be a string.")
    return value


def _to_calls(value: object, role: str, at: str) -> tuple[PastCall, ...]:
    if not value:
        return ()
    if role != "assistant" or not isinstance(value, list):
        raise InvalidField(at, f"'{at}' must be a list, and in messages of the assistant only.")
    return tuple(_to_call(item, f"{at}[{index}]") for index, item in enumerate(value))


def _to_call(value: object, at: str) -> PastCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict):
        raise InvalidField(at, f"'{at}' must be an object with 'id' and 'function'.")
    call_id, name = value.get("id"), function.get("name")
    if call_id is not None and not isinstance(call_id, str):
        raise InvalidField(f"{at}.id", f"'{at}.id' must be a string.")
    if not isinstance(name, str) or not name:
        raise InvalidField(f"{at}.function.name", f"'{at}.function.name' must be a non-empty string.")
    arguments = _to_arguments(function.get("arguments"), f"{at}.function.arguments")
    return PastCall.model_construct(
        id=call_id, function=CalledFunction.model_construct(name=name, arguments=arguments)
    )


def _to_arguments(value: object, at: str) -> dict[str, Any]:
    """The object in a string of JSON; "" counts as no arguments, as some clients send it."""
    if value is None or value == "":
        return {}
    try:
        arguments = from_json(value, allow_inf_nan=False) if isinstance(value, str) else None
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidField(at, f"'{at}' must be a string that holds a JSON object.")
    return arguments


def to_tools(value: object, info: ValidationInfo) -> tuple[dict[str, Any], ...]:
    """The functions as templates read them: what the client sent, less what is null."""
    limit = _limits(info).max_tools
    if not isinstance(value, list) or len(value) > limit:
        raise InvalidField("tools", f"'tools' must be a list of at most {limit} functions.")
    return tuple(_to_tool(item, f"tools[{index}]") for index, item in enumerate(value))


def _to_tool(value: object, at: str) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise UnsupportedParameter(
            f"{at}.type", f"'{at}.type' must be \"function\": others are not supported."
        )
    function = value.get("function") if isinstance(value, dict) else None
    if kind is None or not isinstance(function, dict):
        raise InvalidField(at, f"'{at}' must be an object with type \"function\" and a 'function'.")
    at = f"{at}.function"
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise InvalidField(
            f"{at}.name", f"'{at}.name' must have 1 to 64 letters, digits, underscores, dots or dashes."
        )
    for part, expected, text in (("description", str, "a string"), ("parameters", dict, "an object")):
        if function.get(part) is not None and not isinstance(function[part], expected):
            raise InvalidField(f"{at}.{part}", f"'{at}.{part}' must be {text}.")
    if function.get("strict"):
        raise UnsupportedParameter(
            f"{at}.strict",
            f"'{at}.strict' is not supported by this server: nothing forces the model to keep to a schema.",
        )
    known = ("name", "description", "parameters")
    return {
        "type": "function",
        "function": {part: function[part] for part in known if function.get(part) is not None},
    }


def _to_tool_choice(value: object) -> str:
    """What can be honoured without forcing the model's tokens."""
    if isinstance(value, str) and value in _TOOL_CHOICES:
        return value
    is_forced = value == "required" or (
        isinstance(value, dict) and value.get("type") in ("function", "allowed_tools", "custom")
    )
    if is_forced:
        raise UnsupportedParameter(
            "tool_choice",
            '\'tool_choice\' can be "none" or "auto": nothing forces the model to call a tool.',
        )
    raise InvalidField("tool_choice", f"'tool_choice' must be {accepted_text(Endpoint.CHAT, 'tool_choice')}.")


def _to_text(value: object, at: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidField(at, f"'{at}' must be a string or a list of text parts.")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise UnsupportedParameter(
                f"{at}[{index}].type",
                f"'{at}[{index}].type' must be \"text\": other content is not supported.",
            )
        text = part.get("text") if kind == "text" and isinstance(part, dict) else None
        if not isinstance(text, str):
            raise InvalidField(
                f"{at}[{index}]", f"'{at}[{index}]' must be an object with type \"text\" and a string 'text'."
            )
        texts.append(text)
    return "".join(texts)


def _to_prompts(value: object, info: ValidationInfo) -> tuple[Prompt, ...]:
    """One string, one list of ids, or a list of either; the kind of the first item decides."""
    if isinstance(value, str):
        return (TextPrompt.model_construct(text=value),)
    if isinstance(value, list) and value:
        if _is_int(value[0]):
            return (_to_token_prompt(value, "prompt"),)
        limit = _limits(info).max_prompts
        if len(value) > limit:
            raise InvalidField(
                "prompt", f"'prompt' must have at most {limit} prompts, this one has {len(value)}."
            )
        return tuple(_to_prompt(item, f"prompt[{index}]") for index, item in enumerate(value))
    raise InvalidField("prompt", f"'prompt' must be {accepted_text(Endpoint.COMPLETIONS, 'prompt')}.")


def _to_prompt(value: object, at: str) -> Prompt:
    if isinstance(value, str):
        return TextPrompt.model_construct(text=value)
    return _to_token_prompt(value, at)


def _to_token_prompt(value: object, at: str) -> TokenPrompt:
    if not isinstance(value, list) or not value or not all(map(is_token_id, value)):
        raise InvalidField(at, f"'{at}' must be a string or a non-empty list of token ids.")
    return TokenPrompt.model_construct(token_ids=tuple(value))


def _to_stops(value: object, info: ValidationInfo) -> tuple[str, ...]:
    limits = _limits(info)
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise InvalidField("stop", f"'stop' must be {accepted_text(Endpoint.CHAT, 'stop')}.")
    if len(stops) > limits.max_stop_strings:
        raise InvalidField("stop", f"'stop' must have at most {limits.max_stop_strings} strings.")
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise InvalidField("stop", f"'stop' must be {accepted_text(Endpoint.CHAT, 'stop')}.")
    if any(len(stop) > limits.max_stop_chars for stop in stops):
        raise InvalidField("stop", f"'stop' must have strings of at most {limits.max_stop_chars} characters.")
    return tuple(stops)


def _to_stop_ids(value: object, info: ValidationInfo) -> tuple[int, ...]:
    limit = _limits(info).max_stop_strings
    if isinstance(value, list) and len(value) > limit:
        raise InvalidField("stop_token_ids", f"'stop_token_ids' must have at most {limit} ids.")
    if not isinstance(value, list) or not all(map(is_token_id, value)):
        raise InvalidField(
            "stop_token_ids", f"'stop_token_ids' must be {accepted_text(Endpoint.CHAT, 'stop_token_ids')}."
        )
    return tuple(value)


def _to_salt(value: object, info: ValidationInfo) -> object:
    limit = _limits(info).max_salt_chars
    if isinstance(value, str) and len(value) > limit:
        raise InvalidField("cache_salt", f"'cache_salt' must have at most {limit} characters.")
    return value


def _to_cache_key(value: object, info: ValidationInfo) -> object:
    limit = _limits(info).max_salt_chars
    if isinstance(value, str) and len(value) > limit:
        raise InvalidField("prompt_cache_key", f"'prompt_cache_key' must have at most {limit} characters.")
    return value


def _to_answers(value: object, info: ValidationInfo) -> object:
    limit = _limits(info).max_answers
    if _is_int(value) and isinstance(value, int) and value > limit:
        raise InvalidField("n", f"'n' must be at most {limit}.")
    return value


def _limits(info: ValidationInfo) -> Limits:
    """What `_parse` was given; the defaults for a body built otherwise."""
    return info.context if isinstance(info.context, Limits) else Limits()


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_token_id(value: object) -> bool:
    """Whether some vocabulary could have it."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT32_MAX


_STRINGS = {"type": "array", "items": {"type": "string"}}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PARTS = {
    "type": "array",
    "items": {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}},
}
MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": list(_ROLES)},
            "content": {"anyOf": [{"type": "string"}, _PARTS]},
        },
    },
}
_TOOLS_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "pattern": f"^{_TOOL_NAME.pattern}$"},
                    "description": {"type": "string"},
                    "parameters": {"type": "object"},
                },
            },
        },
    },
}
_PROMPT_SCHEMA = {
    "anyOf": [{"type": "string"}, _IDS, {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS]}}]
}

_FORMAT_SCHEMA = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "json_schema": {"type": "object"},
    },
}
_STRUCTURE_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)

Tokens = Annotated[int, Field(ge=1, le=INT32_MAX)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool = False  # a last chunk without choices carries the usage
    continuous_usage_stats: bool = False  # every chunk carries the usage so far


class RequestBody(SamplingFields):
    """What both endpoints share. Strict: a number in quotes is an error, not a number."""

    model: Annotated[str, Field(min_length=1)]
    max_tokens: Tokens | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 0
    n: Annotated[int, BeforeValidator(_to_answers), Field(ge=1)] = 1  # answers to each prompt
    best_of: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[
        tuple[str, ...],
        BeforeValidator(_to_stops),
        WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS]}),
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_to_stop_ids), WithJsonSchema(_IDS)] = ()
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, BeforeValidator(_to_salt), Field(min_length=1)] | None = None
    prompt_cache_key: Annotated[str, BeforeValidator(_to_cache_key)] | None = None

    response_format: Annotated[
        Structure | None, BeforeValidator(to_format), WithJsonSchema(_FORMAT_SCHEMA)
    ] = None
    structured_outputs: (
        Annotated[Structure, BeforeValidator(to_structure), WithJsonSchema({"type": "object"})] | None
    ) = None
    guided_json: (
        Annotated[Structure, BeforeValidator(to_guided_json), WithJsonSchema({"type": ["object", "string"]})]
        | None
    ) = None
    guided_regex: (
        Annotated[Structure, BeforeValidator(to_guided_regex), WithJsonSchema({"type": "string"})] | None
    ) = None
    guided_choice: (
        Annotated[Structure, BeforeValidator(to_guided_choice), WithJsonSchema(_STRINGS)] | None
    ) = None
    guided_grammar: (
        Annotated[Structure, BeforeValidator(to_guided_grammar), WithJsonSchema({"type": "string"})] | None
    ) = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        given = [name for name in _STRUCTURE_FIELDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidField(given[1], f"'{given[1]}' cannot be used together with '{given[0]}'.")
        if self.stream_options is not None and not self.stream:
            raise InvalidField("stream_options", "'stream_options' is only allowed when 'stream' is true.")
        if self.best_of not in (None, self.n):
            raise UnsupportedParameter(
                "best_of",
                "'best_of' can only be the same as 'n': all answers that are generated are returned.",
            )
        return self

    @property
    def structure(self) -> tuple[str, Structure] | None:
        """What the answer has to be, with the field that says so; None = anything."""
        fields = ((name, getattr(self, name)) for name in _STRUCTURE_FIELDS)
        return next(((name, value) for name, value in fields if value is not None), None)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class ChatBody(RequestBody):
    """POST /v1/chat/completions"""

    messages: Annotated[
        tuple[ChatMessage, ...], BeforeValidator(to_messages), WithJsonSchema(MESSAGES_SCHEMA)
    ]
    max_completion_tokens: Tokens | None = None  # the newer name, so it wins over max_tokens
    tools: Annotated[
        tuple[dict[str, Any], ...], BeforeValidator(to_tools), WithJsonSchema(_TOOLS_SCHEMA)
    ] = ()
    tool_choice: Annotated[
        str, BeforeValidator(_to_tool_choice), WithJsonSchema({"enum": list(_TOOL_CHOICES)})
    ] = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Logprobs = 0

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidField("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """The completion's limit as asked for; None = whatever the context leaves."""
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(RequestBody):
    """POST /v1/completions"""

    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(_to_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    logprobs: Annotated[Logprobs | None, BeforeValidator(false_is_none)] = None
    echo: bool = False  # the answer begins with the prompt, and so do its log probabilities

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise InvalidField(
                "max_tokens", f"'max_tokens' must be {accepted_text(Endpoint.COMPLETIONS, 'max_tokens')}."
            )
        return self

    @property
    def token_limit(self) -> int:
        """What is generated: with `max_tokens: 0` one token all the same, which is not told."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else max(1, self.max_tokens)

    @model_validator(mode="after")
    def _check_answers(self, info: ValidationInfo) -> Self:
        limit = _limits(info).max_answers
        if self.n > 1 and self.n * len(self.prompt) > limit:
            raise InvalidField("n", f"'n' times the number of prompts must be at most {limit}.")
        if self.n > 1 and self.num_prompt_logprobs is not None:
            raise InvalidField("n", "'n' must be 1 where 'echo' and 'logprobs' ask for those of the prompt.")
        return self

    @property
    def tells_output(self) -> bool:
        return self.max_tokens != 0

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None


_DEFAULTS = Limits()


def parse_chat(body: Mapping[str, Any], limits: Limits = _DEFAULTS) -> ChatBody:
    """Raises InvalidField or UnsupportedParameter, naming the field; null counts as absent."""
    return _parse(ChatBody, Endpoint.CHAT, body, limits)


def parse_completion(body: Mapping[str, Any], limits: Limits = _DEFAULTS) -> CompletionBody:
    """Raises InvalidField or UnsupportedParameter, naming the field; null counts as absent."""
    return _parse(CompletionBody, Endpoint.COMPLETIONS, body, limits)


_Body = TypeVar("_Body", bound=RequestBody)


def _parse(kind: type[_Body], endpoint: Endpoint, body: Mapping[str, Any], limits: Limits) -> _Body:
    refuse_unsupported(endpoint, body)
    given = {name: value for name, value in body.items() if value is not None}
    try:
        return kind.model_validate(given, context=limits)
    except ValidationError as error:
        raise _invalid_field(endpoint, error) from None


def _invalid_field(endpoint: Endpoint, error: ValidationError) -> InvalidField:
    """The first thing pydantic found, said with our own words: its messages may quote the input."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "missing":
        return InvalidField(name, f"'{name}' is required.", code="missing_required_parameter")
    param = ".".join(str(part) for part in first["loc"])
    if param != name:  # the only nested model with scalar fields is stream_options
        return InvalidField(param, f"'{param}' must be true or false.")
    return InvalidField(name, f"'{name}' must be {accepted_text(endpoint, name)}.")
