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

from cache.priority import MAX_PRIORITY, MIN_PRIORITY
from cache.structure import Structure
from router.errors import InvalidField, UnsupportedParameter
from router.limits import Limits
from router.openai_api.checked import limits_of, to_salt
from router.openai_api.fields import Endpoint, accepted_text, refuse_unsupported
from router.openai_api.messages import MESSAGES_SCHEMA, ChatMessage, to_messages
from router.openai_api.prompts import (
    IDS_SCHEMA,
    INT32_MAX,
    PROMPTS_SCHEMA,
    Prompt,
    is_int,
    is_token_id,
    to_prompts,
)
from router.openai_api.sampling_fields import Logprobs, SamplingFields, false_is_none
from router.openai_api.structures import (
    to_format,
    to_guided_choice,
    to_guided_grammar,
    to_guided_json,
    to_guided_regex,
    to_structure,
)
from router.openai_api.template_fields import TemplateFields
from router.openai_api.tools import (
    TOOL_CHOICE_SCHEMA,
    TOOLS_SCHEMA,
    Tool,
    ToolChoice,
    to_tool_choice,
    to_tools,
)
from router.sampling import Temperature, TopK, TopP

DEFAULT_COMPLETION_TOKENS = 16  # the API's own default for /v1/completions


def _to_stops(value: object, info: ValidationInfo) -> tuple[str, ...]:
    limits = limits_of(info)
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
    limit = limits_of(info).max_stop_strings
    if isinstance(value, list) and len(value) > limit:
        raise InvalidField("stop_token_ids", f"'stop_token_ids' must have at most {limit} ids.")
    if not isinstance(value, list) or not all(map(is_token_id, value)):
        raise InvalidField(
            "stop_token_ids", f"'stop_token_ids' must be {accepted_text(Endpoint.CHAT, 'stop_token_ids')}."
        )
    return tuple(value)


def _to_answers(value: object, info: ValidationInfo) -> object:
    limit = limits_of(info).max_answers
    if is_int(value) and isinstance(value, int) and value > limit:
        raise InvalidField("n", f"'n' must be at most {limit}.")
    return value


_STRINGS = {"type": "array", "items": {"type": "string"}}
_FORMAT_SCHEMA = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "json_schema": {"type": "object"},
        "schema": {"type": "object"},
    },
}
STRUCTURE_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""Each says what the answer has to be; one of them at most is given."""

Tokens = Annotated[int, Field(ge=1, le=INT32_MAX)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool = False  # a last chunk without choices carries the usage
    continuous_usage_stats: bool = False  # every chunk carries the usage so far
    include_obfuscation: bool = False  # filling that hides how long each chunk's text is: never sent

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {name: each for name, each in value.items() if each is not None}

    @model_validator(mode="after")
    def _check_obfuscation(self) -> Self:
        """Who asks for it relies on it: chunks would be told apart by their sizes all the same."""
        if self.include_obfuscation:
            raise UnsupportedParameter("stream_options.include_obfuscation")
        return self


class RequestBody(SamplingFields):
    """What both endpoints share. Strict: a number in quotes is an error, not a number."""

    model: Annotated[str, Field(min_length=1)]
    max_tokens: Tokens | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    n: Annotated[int, BeforeValidator(_to_answers), Field(ge=1)] = 1  # answers to each prompt
    best_of: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[
        tuple[str, ...],
        BeforeValidator(_to_stops),
        WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS]}),
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_to_stop_ids), WithJsonSchema(IDS_SCHEMA)] = ()
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, BeforeValidator(to_salt), Field(min_length=1)] | None = None
    prompt_cache_key: Annotated[str, BeforeValidator(to_salt)] | None = None
    priority: Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)] | None = None  # least goes first

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
        given = [name for name in STRUCTURE_FIELDS if getattr(self, name) is not None]
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
        fields = ((name, getattr(self, name)) for name in STRUCTURE_FIELDS)
        return next(((name, value) for name, value in fields if value is not None), None)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class ChatBody(RequestBody, TemplateFields):
    """POST /v1/chat/completions"""

    messages: Annotated[
        tuple[ChatMessage, ...], BeforeValidator(to_messages), WithJsonSchema(MESSAGES_SCHEMA)
    ]
    max_completion_tokens: Tokens | None = None  # the newer name, so it wins over max_tokens
    tools: Annotated[tuple[Tool, ...], BeforeValidator(to_tools), WithJsonSchema(TOOLS_SCHEMA)] = ()
    tool_choice: Annotated[
        ToolChoice, BeforeValidator(to_tool_choice), WithJsonSchema(TOOL_CHOICE_SCHEMA)
    ] = Field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Logprobs = 0

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        self.tool_choice.check_against(self.tools)
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

    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(to_prompts), WithJsonSchema(PROMPTS_SCHEMA)]
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    logprobs: Annotated[Logprobs | None, BeforeValidator(false_is_none)] = None
    echo: bool = False  # the answer begins with the prompt, and so do its log probabilities
    add_special_tokens: bool = True  # to prompts that are texts: a BOS, usually; ids are taken as they are

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise InvalidField(
                "max_tokens", f"'max_tokens' must be {accepted_text(Endpoint.COMPLETIONS, 'max_tokens')}."
            )
        if self.max_tokens == 0 and self.min_tokens:
            what = f"'min_tokens' must be between 0 and max_tokens (0), this one is {self.min_tokens}."
            raise InvalidField("min_tokens", what)
        return self

    @property
    def token_limit(self) -> int:
        """What is generated: with `max_tokens: 0` one token all the same, which is not told."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else max(1, self.max_tokens)

    @model_validator(mode="after")
    def _check_answers(self, info: ValidationInfo) -> Self:
        limit = limits_of(info).max_answers
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
_NOTHING: Mapping[str, float] = {}


def parse_chat(
    body: Mapping[str, Any], limits: Limits = _DEFAULTS, absent: Mapping[str, float] = _NOTHING
) -> ChatBody:
    """absent: values of fields that it does not name; null counts as absent.

    Raises InvalidField or UnsupportedParameter, naming the field.
    """
    return _parse(ChatBody, Endpoint.CHAT, body, limits, absent)


def parse_completion(
    body: Mapping[str, Any], limits: Limits = _DEFAULTS, absent: Mapping[str, float] = _NOTHING
) -> CompletionBody:
    """As `parse_chat`."""
    return _parse(CompletionBody, Endpoint.COMPLETIONS, body, limits, absent)


_Body = TypeVar("_Body", bound=RequestBody)


def _parse(
    kind: type[_Body],
    endpoint: Endpoint,
    body: Mapping[str, Any],
    limits: Limits,
    absent: Mapping[str, float],
) -> _Body:
    refuse_unsupported(endpoint, body)
    given = {**absent, **{name: value for name, value in body.items() if value is not None}}
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
