"""What an answer's record says of streams that go right, and which failure it names for those that do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadtest.client.answer import Answer, AnswerReader, Failure

STREAM = {"content-type": "text/event-stream"}


def event(value: Any) -> bytes:
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()


def chat(text: str = "", finish: str | None = None, index: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}]}


def read(*timed: tuple[float, Any], num_choices: int = 1, status: int = 200, end_s: float = 9.0) -> Answer:
    reader = AnswerReader(100.0, num_choices=num_choices)
    reader.began(status, STREAM)
    for at_s, value in timed:
        reader.feed(event(value), 100.0 + at_s)
    return reader.finished(100.0 + end_s)


def test_times_are_those_of_pieces_with_text() -> None:
    """The role's empty chunk is no token, nor is the chunk with the finish reason alone."""
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}
    answer = read(
        (1, chat()), (2, chat("a")), (4, chat("b")), (5, chat("", "length")), (6, usage), (6, "[DONE]")
    )
    assert answer.is_ok
    assert (answer.ttft_s, answer.gaps_s, answer.took_s) == (2.0, (2.0,), 9.0)
    assert answer.tpot_s == 2.0 / 4
    assert answer.cached_tokens is None  # not told: not the same as none


def test_gaps_are_those_of_each_choice() -> None:
    """Several choices come in one step: between two of them nobody waits."""
    steps = [(at, chat(text, None, index)) for at, text in ((2, "a"), (5, "b")) for index in range(3)]
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 6}}
    answer = read(*steps, (5, usage), num_choices=3)
    assert (answer.ttft_s, answer.gaps_s, answer.tpot_s) == (2.0, (3.0, 3.0, 3.0), 3.0)


@pytest.mark.parametrize(
    "fields", [("reasoning_content",), ("reasoning",), ("reasoning_content", "reasoning")]
)
def test_a_thought_is_said_once_by_whatever_name_it_comes(fields: tuple[str, ...]) -> None:
    thought = {"choices": [{"index": 0, "delta": dict.fromkeys(fields, "hm")}]}
    answer = read((1, thought), (2, chat("a", "stop")), (2, "[DONE]"))
    assert (answer.text, answer.ttft_s, answer.gaps_s) == ("hma", 1.0, (1.0,))


def test_tokens_without_text_have_a_first_one_too() -> None:
    answer = read((1, chat()), (3, chat("", "length")), (3, "[DONE]"))
    assert (answer.is_ok, answer.ttft_s, answer.text) == (True, 3.0, "")


def test_completions_and_tool_calls_are_text_too() -> None:
    call = {"index": 0, "delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}
    answer = read((1, {"choices": [call]}), (2, chat("", "tool_calls")), (2, "[DONE]"))
    assert (answer.text, answer.ttft_s, answer.finish_reasons) == ("{}", 1.0, ("tool_calls",))
    answer = read((1, {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}), (2, "[DONE]"))
    assert (answer.text, answer.is_ok) == ("x", True)


def test_every_choice_needs_its_finish_reason() -> None:
    parts = (1, chat("a", "stop")), (2, chat("b", None, 1)), (3, "[DONE]")
    answer = read(*parts, num_choices=2)
    assert answer.failure is Failure.NO_FINISH_REASON
    assert answer.texts == ("a", "b")
    assert read(*parts[:2], (2, chat("", "stop", 1)), (3, "[DONE]"), num_choices=2).is_ok


@pytest.mark.parametrize(
    ("timed", "failure"),
    [
        (((1, chat("a", "stop")),), Failure.NO_DONE),
        ((), Failure.NO_DONE),
        (((1, chat("a")), (2, "[DONE]")), Failure.NO_FINISH_REASON),
        (((1, chat("a")), (2, {"error": {"message": "gone"}}), (3, "[DONE]")), Failure.ERROR_EVENT),
        (((1, "hello"),), Failure.NOT_STREAMED),
        (((1, [1]),), Failure.NOT_STREAMED),
        (((1, chat("a", "stop", 1)), (2, "[DONE]")), Failure.NOT_STREAMED),
        (((1, {"usage": 5}),), Failure.NOT_STREAMED),
        (((1, {"choices": [None]}),), Failure.NOT_STREAMED),
        (((1, {"choices": [{"index": "0", "text": "a"}]}),), Failure.NOT_STREAMED),
        (((1, {"usage": {"prompt_tokens": "many"}}),), Failure.NOT_STREAMED),
        (((1, '{"choices": ' + "[" * 100_000),), Failure.NOT_STREAMED),
    ],
)
def test_what_is_no_whole_answer_says_why(timed: tuple[tuple[float, Any], ...], failure: Failure) -> None:
    assert read(*timed).failure is failure


@pytest.mark.parametrize(
    ("status", "failure"),
    [(429, Failure.BUSY), (503, Failure.BUSY), (400, Failure.STATUS), (500, Failure.STATUS)],
)
def test_an_error_status_carries_what_the_server_said(status: int, failure: Failure) -> None:
    reader = AnswerReader(0.0)
    reader.began(status, {"content-type": "application/json"})
    reader.feed(b'{"error": {"message": "too ', 1.0)
    reader.feed(b'long"}}' + b" " * 1000, 1.0)
    answer = reader.finished(1.0)
    assert (answer.status, answer.failure) == (status, failure)
    assert "too long" in answer.problem
    assert len(answer.problem) <= 200


def test_json_instead_of_a_stream_is_a_failure() -> None:
    reader = AnswerReader(0.0)
    reader.began(200, {"content-type": "application/json"})
    reader.feed(b"{}", 1.0)
    assert reader.finished(1.0).failure is Failure.NOT_STREAMED


def test_what_was_wrong_first_stays_the_reason() -> None:
    reader = AnswerReader(0.0)
    reader.began(200, STREAM)
    reader.feed(event({"error": "engine died"}), 1.0)
    answer = reader.broke(Failure.CUT, "peer closed", 2.0)
    assert (answer.failure, "engine died" in answer.problem) == (Failure.ERROR_EVENT, True)


def test_a_connection_that_breaks_after_the_end_has_cut_nothing() -> None:
    """Nor made it longer: whoever reads such a stream stops at `[DONE]`."""
    reader = AnswerReader(0.0)
    reader.began(200, STREAM)
    for at_s, value in ((1.0, chat("a", "stop")), (2.0, "[DONE]")):
        reader.feed(event(value), at_s)
    answer = reader.broke(Failure.TIMEOUT, "nothing came for 300 s", 302.0)
    assert (answer.failure, answer.took_s, answer.text) == (None, 2.0, "a")
    half = AnswerReader(0.0)
    half.began(200, STREAM)
    half.feed(event(chat("a")) + event("[DONE]"), 1.0)
    assert half.broke(Failure.CUT, "peer closed", 2.0).failure is Failure.NO_FINISH_REASON
