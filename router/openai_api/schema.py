"""The two request bodies as checked values. A value that exists can be generated from.

Knows the API's fields and their ranges; knows neither tokenizer nor replicas: whatever needs those
(unknown model, context length, token ids beyond the vocabulary) is checked in `service.py`.
"""

from __future__ import annotations

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

from router.errors import InvalidField, UnsupportedParameter
from router.limits import Limits
from router.openai_api.fields import Endpoint, accepted_text, refuse_unsupported

DEFAULT_COMPLETION_TOKENS = 16  # the API's own default for /v1/completions
INT32_MAX = (1 << 31) - 1

# The API treats `developer` as the newer name of `system`; chat templates know the old one.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_UNSUPPORTED_ROLES = ("tool", "function")


class ChatMessage(BaseModel):
    """One message, its content joined to plain text."""

    model_config = ConfigDict(frozen=True)

    role: str
    content: str

    def for_template(self) -> dict[str, Any]:
        """As chat templates read messages."""
        return {"role": self.role, "content": self.content}


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
    if role in _UNSUPPORTED_ROLES:
        raise UnsupportedParameter(
            f"{at}.role", f"'{at}.role': tool messages are not supported by this server."
        )
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidField(f"{at}.role", f"'{at}.role' must be one of {', '.join(_ROLES)}.")
    for name in ("tool_calls", "function_call", "audio"):
        if value.get(name):
            raise UnsupportedParameter(f"{at}.{name}", f"'{at}.{name}' is not supported by this server.")
    return ChatMessage.model_construct(
        role=_ROLES[role], content=_to_text(value.get("content"), f"{at}.content")
    )


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
_PROMPT_SCHEMA = {
    "anyOf": [{"type": "string"}, _IDS, {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS]}}]
}

Tokens = Annotated[int, Field(ge=1, le=INT32_MAX)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool = False  # a last chunk without choices carries the usage
    continuous_usage_stats: bool = False  # every chunk carries the usage so far


class RequestBody(BaseModel):
    """What both endpoints share. Strict: a number in quotes is an error, not a number."""

    model_config = ConfigDict(strict=True, frozen=True)

    model: Annotated[str, Field(min_length=1)]
    max_tokens: Tokens | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 0
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

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidField("stream_options", "'stream_options' is only allowed when 'stream' is true.")
        return self

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

    @property
    def token_limit(self) -> int | None:
        """The completion's limit as asked for; None = whatever the context leaves."""
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(RequestBody):
    """POST /v1/completions"""

    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(_to_prompts), WithJsonSchema(_PROMPT_SCHEMA)]

    @property
    def token_limit(self) -> int:
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS


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
