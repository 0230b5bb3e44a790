"""What is written by template is, byte for byte, what the models of the API's objects serialize to."""

from __future__ import annotations

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.messages import Delta, FinishReason, Logprobs
from router.openai_api import logprobs
from router.openai_api.codec import ChatCodec, Choice, CompletionCodec, Head
from router.openai_api.logprobs import ChatLogprobRecord, CompletionLogprobRecord
from router.openai_api.pieces import Piece, ToolCall
from router.openai_api.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatFinishReason,
    ChatLogprobs,
    ChatTokenLogprob,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FunctionCall,
    ToolCallDelta,
    ToolCallEntry,
    TopLogprob,
    Usage,
    usage_of,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
heads = st.builds(Head, id=texts, created=st.integers(0, 1 << 40), model=texts)
counts = st.integers(0, 1 << 40)
usages = st.builds(usage_of, counts, counts, counts)
reasons = st.none() | st.sampled_from(FinishReason)
earlier_calls = st.just([]) | st.just([ToolCall("call_1", "f", "{}")])


@given(
    heads,
    st.integers(0, 127),
    texts,
    texts,
    reasons,
    st.booleans(),
    earlier_calls,
    st.none() | usages,
    st.booleans(),
)
def test_a_chat_chunk_is_its_models(
    head: Head,
    index: int,
    text: str,
    thought: str,
    reason: FinishReason | None,
    has_started: bool,
    calls: list[ToolCall],
    usage: Usage | None,
    has_usage: bool,
) -> None:
    choice = Choice(1, has_started=has_started, finish_reason=reason, calls=calls)
    delta: dict[str, object] = {} if has_started else {"role": "assistant", "content": text}
    if text:
        delta["content"] = text
    if thought:
        delta["reasoning_content"] = thought
        if not has_started:
            delta["content"] = text or None
    told = "tool_calls" if calls and reason is FinishReason.STOP else reason
    entry = ChatChunkChoice(
        index=index, delta=ChatDelta.model_validate(delta), logprobs=None, finish_reason=told
    )
    expected = ChatCompletionChunk(
        id=head.id, object="chat.completion.chunk", created=head.created, model=head.model, choices=[entry]
    )
    if has_usage:
        expected = expected.model_copy(update={"usage": usage})
    piece = Piece(text, thought=thought)
    assert ChatCodec(head).chunk(index, choice, piece, usage, has_usage) == expected.encoded()


@given(heads, st.integers(0, 127), texts, reasons, st.none() | usages, st.booleans())
def test_a_completion_chunk_is_its_models(
    head: Head, index: int, text: str, reason: FinishReason | None, usage: Usage | None, has_usage: bool
) -> None:
    choice = Choice(1, finish_reason=reason)
    entry = CompletionChoice(index=index, text=text, logprobs=None, finish_reason=reason)
    expected = Completion(
        id=head.id, object="text_completion", created=head.created, model=head.model, choices=[entry]
    )
    if has_usage:
        expected = expected.model_copy(update={"usage": usage})
    assert CompletionCodec(head).chunk(index, choice, Piece(text), usage, has_usage) == expected.encoded()


@given(heads, texts, texts, st.sampled_from(FinishReason), earlier_calls, usages)
def test_a_whole_chat_is_its_models(
    head: Head, text: str, thought: str, reason: FinishReason, calls: list[ToolCall], usage: Usage
) -> None:
    choice = Choice(1, texts=[text], thoughts=[thought], finish_reason=reason, calls=calls)
    message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        function = FunctionCall(name="f", arguments="{}")
        entry = ToolCallEntry(id="call_1", type="function", function=function)
        message |= {"content": text or None, "tool_calls": [entry]}
    told: ChatFinishReason = "tool_calls" if calls and reason is FinishReason.STOP else reason
    expected = ChatCompletion(
        id=head.id,
        object="chat.completion",
        created=head.created,
        model=head.model,
        choices=[
            ChatChoice(
                index=index,
                message=AssistantMessage.model_validate(message),
                logprobs=None,
                finish_reason=told,
            )
            for index in (0, 1)
        ],
        usage=usage,
    )
    assert ChatCodec(head).whole([choice, choice], usage) == expected.encoded()


@given(heads, texts, st.sampled_from(FinishReason), usages)
def test_a_whole_completion_is_its_models(head: Head, text: str, reason: FinishReason, usage: Usage) -> None:
    choice = Choice(1, texts=[text], finish_reason=reason)
    expected = Completion(
        id=head.id,
        object="text_completion",
        created=head.created,
        model=head.model,
        choices=[
            CompletionChoice(index=index, text=text, logprobs=None, finish_reason=reason) for index in (0, 1)
        ],
        usage=usage,
    )
    assert CompletionCodec(head).whole([choice, choice], usage) == expected.encoded()


@given(heads, st.booleans(), texts, texts, reasons, st.booleans())
def test_a_chunk_with_calls_is_its_models(
    head: Head, has_started: bool, text: str, thought: str, reason: FinishReason | None, has_usage: bool
) -> None:
    choice = Choice(1, has_started=has_started, finish_reason=reason)
    delta: dict[str, object] = {} if has_started else {"role": "assistant"}
    if text or not has_started:
        delta["content"] = text or None
    if thought:
        delta["reasoning_content"] = thought
    function = FunctionCall(name=text, arguments="{}")
    delta["tool_calls"] = [ToolCallDelta(id="call_1", type="function", function=function, index=0)]
    entry = ChatChunkChoice(
        index=7,
        delta=ChatDelta.model_validate(delta),
        logprobs=None,
        finish_reason="tool_calls" if reason is FinishReason.STOP else reason,
    )
    expected = ChatCompletionChunk(
        id=head.id, object="chat.completion.chunk", created=head.created, model=head.model, choices=[entry]
    )
    if has_usage:
        expected = expected.model_copy(update={"usage": None})
    piece = Piece(text, (ToolCall("call_1", text, "{}"),), thought)
    assert ChatCodec(head).chunk(7, choice, piece, None, has_usage) == expected.encoded()


# Whole characters, parts of one, what is no character, tokens spelled alike, and one that is special.
SPELLED = [b"a", b" b", '"\u2028'.encode(), b"\xf0\x9f", b"\x8c\x8a", b"\xff", b"a", b"<s>", b"\x7f\n"]
SPECIAL = SPELLED.index(b"<s>")
ids = st.integers(0, len(SPELLED) - 1)
numbers = st.floats(width=32)


@st.composite
def scored(draw: st.DrawFn, token_ids: list[int]) -> Logprobs:
    num_top = draw(st.integers(0, 4))
    size, top_size = len(token_ids), len(token_ids) * num_top
    return Logprobs(
        num_top,
        array("f", draw(st.lists(numbers, min_size=size, max_size=size))),
        array("i", draw(st.lists(ids, min_size=top_size, max_size=top_size))),
        array("f", draw(st.lists(numbers, min_size=top_size, max_size=top_size))),
    )


def tops(found: Logprobs) -> list[list[tuple[int, float]]]:
    """Naively, a list for each token."""
    pairs = list(zip(found.top_ids, found.top, strict=True))
    return [pairs[at * found.num_top : (at + 1) * found.num_top] for at in range(len(found))]


def shown(token_id: int, mark: str) -> str:
    try:
        return SPELLED[token_id].decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in SPELLED[token_id])


@given(st.data(), st.lists(ids, min_size=1, max_size=6), st.integers(1, 4))
def test_a_chats_log_probabilities_are_their_models(
    data: st.DataObject, token_ids: list[int], piece_size: int
) -> None:
    found = data.draw(scored(token_ids))

    def told(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(token=shown(token_id, ""), bytes=list(SPELLED[token_id]), logprob=logprob)

    content = [
        ChatTokenLogprob(
            **told(token_id, logprob).model_dump(), top_logprobs=[told(*other) for other in others]
        )
        for token_id, logprob, others in zip(token_ids, found.chosen, tops(found), strict=True)
    ]
    record = ChatLogprobRecord(SPELLED.__getitem__)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(logprobs, "_SLICE", piece_size)
        record.take(Delta("", tuple(token_ids), 0, None, found))
    assert record.due() == ChatLogprobs(content=content, refusal=None).encoded()
    assert record.due() is None


@given(st.data(), st.lists(ids, min_size=1, max_size=6), st.integers(1, 4))
def test_a_completions_log_probabilities_are_their_models(
    data: st.DataObject, token_ids: list[int], piece_size: int
) -> None:
    """Offsets apart, which `test_logprobs.py` has: here they are as the record says."""
    found = data.draw(scored(token_ids[1:]))
    top: list[dict[str, float] | None] = [None]
    for token_id, logprob, others in zip(token_ids[1:], found.chosen, tops(found), strict=True):
        named: dict[str, float] = {}
        for other, other_logprob in (*others, (token_id, logprob)):
            named.setdefault(shown(other, "bytes:"), other_logprob)
        top.append(named)
    record = CompletionLogprobRecord(
        SPELLED.__getitem__, lambda token_id: token_id == SPECIAL, prompt=token_ids, prompt_text="x"
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(logprobs, "_SLICE", piece_size)
        record.take(Delta("", (), 0, None, None, found))
    due = record.due()
    assert due is not None
    expected = CompletionLogprobs(
        text_offset=json.loads(due)["text_offset"],
        token_logprobs=[None, *found.chosen],
        tokens=[shown(token_id, "bytes:") for token_id in token_ids],
        top_logprobs=top,
    )
    assert due == expected.encoded()
    assert record.due() is None
