"""A chunk written by template is, byte for byte, what the models of the API's objects serialize to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache.messages import FinishReason
from router.openai_api.codec import ChatCodec, Choice, CompletionCodec, Head
from router.openai_api.responses import (
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatDelta,
    Completion,
    CompletionChoice,
    Usage,
    usage_of,
)
from router.openai_api.tool_calls import Piece, ToolCall

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
    reason: FinishReason | None,
    has_started: bool,
    calls: list[ToolCall],
    usage: Usage | None,
    has_usage: bool,
) -> None:
    choice = Choice(1, has_started=has_started, finish_reason=reason, calls=calls)
    delta = {} if has_started else {"role": "assistant", "content": text}
    if text:
        delta["content"] = text
    told = "tool_calls" if calls and reason is FinishReason.STOP else reason
    entry = ChatChunkChoice(
        index=index, delta=ChatDelta.model_validate(delta), logprobs=None, finish_reason=told
    )
    expected = ChatCompletionChunk(
        id=head.id, object="chat.completion.chunk", created=head.created, model=head.model, choices=[entry]
    )
    if has_usage:
        expected = expected.model_copy(update={"usage": usage})
    assert ChatCodec(head).chunk(index, choice, Piece(text), usage, has_usage) == expected.encoded()


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
