"""Server-sent events are the same however the network cuts them; a truncated stream is no whole answer."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client.answer import Answer, AnswerReader, Failure
from loadtest.client.errors import EventTooLong
from loadtest.client.sse import Event, EventParser
from loadtest.open_loop.tally import Tally
from loadtest.users.counts import Counts

LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
VALUES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "x-warmpath-replica": "r1"}


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[Event]]:
    """Bytes, and the events in them: built line by line, beside comments and fields nobody reads."""
    out = bytearray(draw(st.sampled_from([b"", b"\xef\xbb\xbf"])))
    events = []
    for _ in range(draw(st.integers(0, 5))):
        name = draw(st.sampled_from(["", "error", "ping"]))
        data = draw(st.lists(VALUES, max_size=3))
        lines = [b": a comment", b"id: 7"][: draw(st.integers(0, 2))]
        lines += [f"event: {name}".encode()] if name else []
        lines += [b"data: " + value.encode() for value in data]
        for line in [*lines, b""]:
            end = draw(LINE_ENDS)
            # A blank line's LF right after a CR would be the second half of CR LF.
            out += line + (b"\r" if not line and end == b"\n" and out.endswith(b"\r") else end)
        if data:
            events.append(Event("\n".join(data).encode(), name or "message"))
    return bytes(out), events


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


@given(streams(), st.lists(st.integers(0, 10_000), max_size=12))
def test_events_do_not_depend_on_where_the_bytes_are_cut(
    stream: tuple[bytes, list[Event]], cuts: list[int]
) -> None:
    data, expected = stream
    parser = EventParser()
    assert [event for piece in pieces(data, cuts) for event in parser.feed(piece)] == expected
    assert not parser.is_inside_event


@given(streams())
def test_byte_by_byte(stream: tuple[bytes, list[Event]]) -> None:
    data, expected = stream
    parser = EventParser()
    assert [event for byte in data for event in parser.feed(bytes([byte]))] == expected


def test_an_event_without_end_is_refused() -> None:
    parser = EventParser(max_event_bytes=100)
    parser.feed(b"data: " + b"x" * 60 + b"\n")
    with pytest.raises(EventTooLong):
        parser.feed(b"data: " + b"x" * 60)


def chunk(text: str, finish: str | None = None, index: int = 0) -> dict[str, object]:
    return {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 32}},
}
WHOLE = (
    b"".join(
        f"data: {json.dumps(each, ensure_ascii=False)}\n\n".encode()
        for each in (chunk(""), chunk("Grüß"), chunk("e, "), chunk("東京", "stop"), USAGE)
    )
    + b"data: [DONE]\n\n"
)


def read(parts: list[bytes]) -> Answer:
    """Each piece comes a second after the one before it."""
    reader = AnswerReader(0.0)
    reader.began(200, HEADERS)
    for second, part in enumerate(parts, start=1):
        reader.feed(part, float(second))
    return reader.finished(float(len(parts) + 1))


@given(st.lists(st.integers(0, 10_000), max_size=12))
def test_an_answer_does_not_depend_on_where_its_stream_is_cut(cuts: list[int]) -> None:
    answer = read(pieces(WHOLE, cuts))
    assert answer.is_ok
    assert answer.text == "Grüße, 東京"
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (40, 32, 3)
    assert (answer.replica, answer.finish_reasons) == ("r1", ("stop",))
    assert answer.ttft_s is not None
    assert len(answer.gaps_s) == 2
    assert answer.ttft_s + sum(answer.gaps_s) <= answer.took_s


@given(st.integers(0, len(WHOLE) - 1), st.lists(st.integers(0, 10_000), max_size=4))
def test_a_stream_that_ends_early_is_never_a_whole_answer(length: int, cuts: list[int]) -> None:
    """Nothing shorter than the blank line's first line end after [DONE] counts, however clean its end."""
    answer = read(pieces(WHOLE[:length], cuts))
    assert answer.failure is Failure.NO_DONE
    assert not answer.is_ok


KEYS = (
    "choices",
    "usage",
    "index",
    "delta",
    "text",
    "content",
    "tool_calls",
    "function",
    "arguments",
    "error",
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)
WHOLE_CHUNK: Any = {
    "choices": [
        {
            "index": 0,
            "delta": {"content": "x", "tool_calls": [{"function": {"arguments": "{}"}}]},
            "text": "y",
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 4, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}},
    "error": None,
}


@st.composite
def malformed(draw: st.DrawFn) -> Any:
    """A chunk in which one thing, at whatever depth, is anything."""

    def changed(value: Any) -> Any:
        if not isinstance(value, dict | list) or draw(st.integers(0, 3)) == 0:
            return draw(ANYTHING)
        if isinstance(value, list):
            return [changed(value[0])]
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: changed(value[key])}

    return changed(WHOLE_CHUNK)


def is_taken_in(answer: Answer) -> None:
    """Whoever counts answers can count this one; what it has is of the types that it says."""
    counts, tally = Counts(), Tally()
    counts.of("chat").add(answer)
    tally.sent(0.0, 0.0)
    tally.answered(0.0, 0.0, answer)
    assert tally.answers + tally.num_failed == 1
    for number in (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens):
        assert number is None or (type(number) is int and number >= 0)
    answer.text.encode()  # it may be asked back, as a chat's history


@given(malformed() | ANYTHING, st.sampled_from([b"", b"event: error\n"]))
def test_whatever_a_server_sends_for_a_chunk_is_an_answer_or_a_failed_one(value: Any, name: bytes) -> None:
    """It was an exception, which ended a whole replay."""
    event = name + f"data: {json.dumps(value)}\n\n".encode()
    is_taken_in(read([event, WHOLE]))


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_bytes_that_are_nothing_are_a_failed_answer(before: bytes, inside: bytes) -> None:
    quoted = b'{"choices": [{"delta": {"content": "' + inside + b'"}}]}'
    for data in (before, b"data: " + before + b"\n\n", b"data: " + quoted + b"\n\n"):
        is_taken_in(read([data, b"\n\n" + WHOLE]))
