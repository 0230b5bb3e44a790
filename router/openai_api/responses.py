"""What goes back: completion objects, stream chunks, the model list, as pydantic models.

Serialized with `exclude_unset`, so an explicit null (`finish_reason`) is sent and an absent field is
not. Knows values; knows neither where they came from nor how they are sent.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from cache.messages import FinishReason

ChatFinishReason = FinishReason | Literal["tool_calls"]


class _Out(BaseModel):
    model_config = ConfigDict(frozen=True, protected_namespaces=())

    def encoded(self) -> bytes:
        return self.model_dump_json(exclude_unset=True).encode()


class PromptTokensDetails(_Out):
    cached_tokens: int


class Usage(_Out):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails  # always there: 0 is an answer too


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )


class FunctionCall(_Out):
    name: str
    arguments: str  # JSON


class ToolCallEntry(_Out):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ToolCallDelta(ToolCallEntry):
    index: int  # of the choice's calls


class MoreArguments(_Out):
    arguments: str


class ArgumentsDelta(_Out):
    """What a call's arguments go on with."""

    index: int  # of the choice's calls
    function: MoreArguments


class AssistantMessage(_Out):
    role: Literal["assistant"]
    content: str | None  # null where there is nothing but calls
    reasoning_content: str = ""  # absent unless there is some
    refusal: None
    tool_calls: list[ToolCallEntry] = []  # absent unless there are some


class TopLogprob(_Out):
    token: str
    bytes: list[int]
    logprob: float


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Out):
    content: list[ChatTokenLogprob]
    refusal: None


class CompletionLogprobs(_Out):
    """One entry per token in each list; null where nothing precedes the token."""

    text_offset: list[int]  # characters of the choice's text before the token's
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class ChatChoice(_Out):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(_Out):
    id: str
    object: Literal["chat.completion"]
    created: int  # unix seconds
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(_Out):
    role: Literal["assistant"] = "assistant"
    content: str | None = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta | ArgumentsDelta] = []


class ChatChunkChoice(_Out):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatCompletionChunk(_Out):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChoice(_Out):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(_Out):
    """Both the whole answer and a stream's chunk: the API uses one object for the two."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class DetokenizeResponse(_Out):
    prompt: str


class ModelCard(_Out):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str  # what was loaded under this name
    max_model_len: int | None  # None until a replica has told


class ModelList(_Out):
    object: Literal["list"]
    data: list[ModelCard]


class PrefixObject(_Out):
    """A held prefix. `usage` and `prompt_tokens` are told once, when it is made."""

    id: str
    object: Literal["prefix"]
    created: int  # unix seconds
    model: str
    status: Literal["held", "partial"]  # partial: a copy was lost and is being made again
    blocks: int  # of one copy
    tokens: int  # in those
    copies: int  # wanted
    replicas: list[str]  # that hold one now
    expires_at: int  # unix seconds
    prompt_tokens: int | None = None  # that longer prompts share; what is in no whole block is not held
    usage: Usage | None = None  # of all copies


class PrefixList(_Out):
    object: Literal["list"]
    data: list[PrefixObject]


class PrefixDeleted(_Out):
    id: str
    object: Literal["prefix.deleted"]
    deleted: bool
