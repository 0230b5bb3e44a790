"""From deltas to the two endpoints' objects: a stream's chunks, or one whole answer.

Chunks of text are written by a template that holds what all of an answer's chunks have in common: building
and serializing the models of `responses.py` for each takes ten times as long. The bytes are the models' own.
Where there are many log probabilities to write, a thread does it.

Counts tokens and keeps text per choice; knows nothing of where deltas come from or how bytes are sent.
A choice gets exactly one finish_reason. The role travels with the first content, never ahead of the
first computed token: a chunk before that would make a slow answer look fast.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from pydantic_core import to_json

from cache.errors import ServingError
from cache.messages import Delta, FinishReason
from router.openai_api.logprobs import LogprobRecord, NoLogprobs, num_told
from router.openai_api.pieces import Piece, PlainReader, Reader, ToolCall
from router.openai_api.responses import (
    ArgumentsDelta,
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatFinishReason,
    Completion,
    FunctionCall,
    MoreArguments,
    ToolCallDelta,
    ToolCallEntry,
    Usage,
    usage_of,
)
from router.openai_api.streams import DONE, Indexed, event

# Some ten milliseconds of writing.
OFFLOAD_LOGPROBS = 10_000

T = TypeVar("T")


class Unfinished(ServingError):
    """All deltas are in and a choice has no finish_reason: never passed off as a whole answer."""


@dataclass(slots=True)
class Choice:
    """One prompt's answer so far."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    has_started: bool = False  # a chunk of it was sent
    finish_reason: FinishReason | None = None
    reader: Reader = field(default_factory=PlainReader)
    logprobs: LogprobRecord = field(default_factory=NoLogprobs)
    echo: str = ""  # the prompt, where the answer begins with it
    tells_output: bool = True  # False: one token was generated, for the prompt's sake, and is nobody's
    calls: list[ToolCall] = field(default_factory=list)
    is_cut: bool = False  # it has ended within a call
    _more: list[str] = field(default_factory=list)  # of the last call's arguments

    @property
    def content(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        """What was thought before the content."""
        return "".join(self.thoughts)

    def take(self, delta: Delta) -> Piece:
        """Counts it; what of its text, and of what was held back before, is settled now."""
        if self.finish_reason is not None:
            raise Unfinished("a delta came after the finish_reason")
        if not self.completion_tokens:  # the count belongs to the first admission
            self.cached_tokens = min(delta.cached_tokens, self.prompt_tokens)
        self.logprobs.take(delta)
        self.finish_reason = delta.finish_reason
        echo, self.echo = self.echo, ""
        if not self.tells_output:
            self.finish_reason = delta.finish_reason and FinishReason.LENGTH
            return Piece(echo)
        self.completion_tokens += len(delta.token_ids)
        piece = self.reader.read(delta.text, delta.finish_reason)
        self.is_cut = piece.is_cut
        return replace(piece, text=echo + piece.text) if echo else piece

    def add(self, piece: Piece) -> None:
        """Keeps it, for an answer that is told as a whole."""
        self.texts.append(piece.text)
        self.thoughts.append(piece.thought)
        if piece.more:
            self._more.append(piece.more)
        if piece.calls:
            self.complete_call()
            self.calls += piece.calls

    def complete_call(self) -> None:
        """The last call has all that has come of its arguments."""
        if self._more:
            last = self.calls[-1]
            self.calls[-1] = replace(last, arguments="".join([last.arguments, *self._more]))
            self._more.clear()


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer carries."""

    id: str
    created: int  # unix seconds
    model: str


class Codec(Protocol):
    """One endpoint's objects."""

    def chunk(self, index: int, choice: Choice, piece: Piece, usage: Usage | None, has_usage: bool) -> bytes:
        """One chunk's JSON, before `choice` takes in the piece. has_usage: the key is there, null or not."""

    def usage_chunk(self, usage: Usage) -> bytes:
        """The chunk after the last one: no choices, the usage."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The whole answer's JSON."""


@dataclass(frozen=True, slots=True)
class ChatCodec:
    head: Head
    _opening: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_opening", _up_to_choices(self._object(None, False)))

    def chunk(self, index: int, choice: Choice, piece: Piece, usage: Usage | None, has_usage: bool) -> bytes:
        if piece.calls or piece.more:
            return self._chunk_with_calls(index, choice, piece, usage, has_usage)
        members = [] if choice.has_started else [b'"role":"assistant"']
        if piece.text or not choice.has_started:
            members.append(b'"content":' + to_json(None if piece.thought and not piece.text else piece.text))
        if piece.thought:
            members.append(b'"reasoning_content":' + to_json(piece.thought))
        reason = choice.finish_reason and _chat_finish_reason(choice, has_calls=bool(choice.calls))
        return b'%b{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":%b}]%b}' % (
            *(self._opening, index, b",".join(members), _logprobs(choice)),
            *(_quoted(reason), _usage_member(usage, has_usage)),
        )

    def _chunk_with_calls(
        self, index: int, choice: Choice, piece: Piece, usage: Usage | None, has_usage: bool
    ) -> bytes:
        part: dict[str, object] = {} if choice.has_started else {"role": "assistant"}
        if piece.text or not choice.has_started:
            part["content"] = piece.text or None
        if piece.thought:
            part["reasoning_content"] = piece.thought
        first = len(choice.calls)
        more = [ArgumentsDelta(index=first - 1, function=MoreArguments(arguments=piece.more))]
        part["tool_calls"] = [
            *(more if piece.more else []),
            *(ToolCallDelta(index=first + offset, **_entry(call)) for offset, call in enumerate(piece.calls)),
        ]
        delta = ChatDelta.model_validate(part).encoded()
        reason = choice.finish_reason and _chat_finish_reason(choice, has_calls=True)
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]%b}' % (
            *(self._opening, index, delta, _logprobs(choice)),
            *(_quoted(reason), _usage_member(usage, has_usage)),
        )

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._object(usage, True).encoded()

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        answer = ChatCompletion(
            id=self.head.id,
            object="chat.completion",
            created=self.head.created,
            model=self.head.model,
            choices=[],
            usage=usage,
        )
        return _with_choices(answer, [self._whole(index, choice) for index, choice in enumerate(choices)])

    def _whole(self, index: int, choice: Choice) -> bytes:
        reason = _chat_finish_reason(choice, has_calls=bool(choice.calls))
        return b'{"index":%d,"message":%b,"logprobs":%b,"finish_reason":%b}' % (
            *(index, _message(choice).encoded(), _logprobs(choice), _quoted(reason)),
        )

    def _object(self, usage: Usage | None, has_usage: bool) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(
            id=self.head.id,
            object="chat.completion.chunk",
            created=self.head.created,
            model=self.head.model,
            choices=[],
        )
        return chunk.model_copy(update={"usage": usage}) if has_usage else chunk


@dataclass(frozen=True, slots=True)
class CompletionCodec:
    head: Head
    _opening: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_opening", _up_to_choices(self._object(None, False)))

    def chunk(self, index: int, choice: Choice, piece: Piece, usage: Usage | None, has_usage: bool) -> bytes:
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}]%b}' % (
            *(self._opening, index, to_json(piece.text), _logprobs(choice)),
            *(_quoted(choice.finish_reason), _usage_member(usage, has_usage)),
        )

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._object(usage, True).encoded()

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        entries = [
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}'
            % (index, to_json(choice.content), _logprobs(choice), _quoted(_finish_reason(choice)))
            for index, choice in enumerate(choices)
        ]
        return _with_choices(self._object(usage, True), entries)

    def _object(self, usage: Usage | None, has_usage: bool) -> Completion:
        completion = Completion(
            id=self.head.id,
            object="text_completion",
            created=self.head.created,
            model=self.head.model,
            choices=[],
        )
        return completion.model_copy(update={"usage": usage}) if has_usage else completion


def _up_to_choices(without_choices: ChatCompletionChunk | Completion) -> bytes:
    """An object's JSON up to where its choices are listed."""
    encoded = without_choices.encoded()
    assert encoded.endswith(b'"choices":[]}')
    return encoded.removesuffix(b"]}")


def _quoted(reason: ChatFinishReason | None) -> bytes:
    """A finish_reason, whose words need no escaping."""
    return b"null" if reason is None else b'"%b"' % reason.encode()


def _with_choices(answer: ChatCompletion | Completion, choices: Sequence[bytes]) -> bytes:
    """The JSON of an answer that has none yet. In strings its quotes would be escaped."""
    begin, mark, end = answer.encoded().partition(b'"choices":[]')
    assert mark
    return b'%b"choices":[%b]%b' % (begin, b",".join(choices), end)


def _logprobs(choice: Choice) -> bytes:
    """Those of all tokens since the last chunk, the ones whose text was held back included."""
    return choice.logprobs.due() or b"null"


def _usage_member(usage: Usage | None, has_usage: bool) -> bytes:
    if not has_usage:
        return b""
    return b',"usage":' + (b"null" if usage is None else usage.encoded())


def _message(choice: Choice) -> AssistantMessage:
    parts: dict[str, Any] = {"content": choice.content}
    if choice.reasoning:
        parts["reasoning_content"] = choice.reasoning
    if choice.calls:
        parts["content"] = choice.content or None
        parts["tool_calls"] = [ToolCallEntry.model_validate(_entry(call)) for call in choice.calls]
    return AssistantMessage(role="assistant", refusal=None, **parts)


def _entry(call: ToolCall) -> dict[str, Any]:
    function = FunctionCall(name=call.name, arguments=call.arguments)
    return {"id": call.id, "type": "function", "function": function}


def _chat_finish_reason(choice: Choice, *, has_calls: bool) -> ChatFinishReason:
    """An answer that calls tools ends because of them, if it was not cut off: by its length, or by what its
    client wants it to stop at, which may stand within a call."""
    reason = _finish_reason(choice)
    return "tool_calls" if has_calls and reason is FinishReason.STOP and not choice.is_cut else reason


def _finish_reason(choice: Choice) -> FinishReason:
    if choice.finish_reason is None:
        raise Unfinished("a choice ended without finish_reason")
    return choice.finish_reason


def total_usage(choices: Sequence[Choice]) -> Usage:
    """Of the whole request: all its prompts together, as the API counts."""
    return usage_of(
        sum(choice.prompt_tokens for choice in choices),
        sum(choice.completion_tokens for choice in choices),
        sum(choice.cached_tokens for choice in choices),
    )


async def _soon(num_logprobs: int, job: Callable[[], T]) -> T:
    """What the job makes, on a thread where there are many log probabilities to write: others' answers go on.

    A choice is one task's, which waits here; left, it is nobody's.
    """
    return job() if num_logprobs < OFFLOAD_LOGPROBS else await asyncio.to_thread(job)


def _event(
    codec: Codec, index: int, choice: Choice, piece: Piece, usage: Usage | None, *, has_usage: bool
) -> bytes:
    return event(codec.chunk(index, choice, piece, usage, has_usage))


async def whole_answer(
    codec: Codec, choices: Sequence[Choice], deltas: AsyncGenerator[Indexed, None]
) -> bytes:
    """One JSON object, when every choice has finished. Closes `deltas`."""
    total = 0
    async with aclosing(deltas):
        async for item in deltas:
            choice = choices[item.index]
            size = num_told(item.delta)
            piece = await _soon(size, partial(choice.take, item.delta))
            choice.add(piece)
            total += size
    for choice in choices:
        choice.complete_call()
    return await _soon(total, lambda: codec.whole(choices, total_usage(choices)))


async def event_stream(
    codec: Codec,
    choices: Sequence[Choice],
    deltas: AsyncGenerator[Indexed, None],
    *,
    include_usage: bool,
    continuous_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """The events of a whole answer, `[DONE]` last. Raises whatever `deltas` raises, then sends no more.
    Closes them, also where nobody takes what has just been sent.

    What ends the answer comes in one piece, with the chunk that finished its last choice: sending costs by
    the piece, not by the byte.
    """
    has_usage = include_usage or continuous_usage
    ending: list[bytes] = []
    async with aclosing(deltas):
        async for item in deltas:
            choice = choices[item.index]
            size = num_told(item.delta)
            piece = await _soon(size, partial(choice.take, item.delta))
            if piece.is_empty and item.delta.finish_reason is None:
                continue  # tokens whose text is held back: nothing to show yet
            usage = total_usage(choices) if continuous_usage else None
            content = await _soon(
                size, partial(_event, codec, item.index, choice, piece, usage, has_usage=has_usage)
            )
            choice.calls += piece.calls
            choice.has_started = True
            if all(choice.finish_reason is not None for choice in choices):
                ending.append(content)
            else:
                yield content
    for choice in choices:
        _finish_reason(choice)
    if include_usage:
        ending.append(event(codec.usage_chunk(total_usage(choices))))
    ending.append(DONE)
    yield b"".join(ending)
