"""Thoughts are parted from answers, in text however it is cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.messages import FinishReason
from router.openai_api.pieces import Piece, PlainReader, Reader
from router.openai_api.thoughts import THOUGHT_TAGS, ThoughtReader, ends_in_thought, thinks
from router.openai_api.tool_calls import HermesReader
from tests.fakes.tokenizers import CALL, CHATML, HERMES, THINKING

# Whether the prompt opened the thought; what is written; thought, answer.
CASES: list[tuple[bool, str, str, str]] = [
    (False, "<think>\nhm\n</think>\n\nHello", "hm", "Hello"),
    (False, "\n<think>hm</think>Hello\n", "hm", "Hello\n"),
    (False, "Hello", "", "Hello"),
    (False, " \nHello", "", " \nHello"),
    (False, "", "", ""),
    (False, "  ", "", "  "),
    (False, "<thin", "", "<thin"),
    (False, "<thing>", "", "<thing>"),
    (False, "So <think>hm</think> it is", "", "So <think>hm</think> it is"),  # not where a thought begins
    (False, "hm</think>Hello", "", "hm</think>Hello"),
    (False, "<think>\n\n</think>\n\nHello", "", "Hello"),
    (False, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    (False, "<think>a <b </ </thinker> \n\n c</think>d", "a <b </ </thinker> \n\n c", "d"),
    (False, "<think>hm, <think>", "hm, <think>", ""),
    (False, "<think>cut off </thi", "cut off </thi", ""),
    (False, "<think>", "", ""),
    (False, "<think>hm</think>", "hm", ""),
    (False, "<think>hm</think> \n", "hm", ""),
    (True, "hm\n</think>\n\nHello", "hm", "Hello"),
    (True, "<think>\nhm</think>Hello", "hm", "Hello"),
    (True, "cut off", "cut off", ""),
    (True, "<thi", "<thi", ""),
    (True, "", "", ""),
    (True, " \n", "", ""),
]


def read(reader: Reader, parts: Sequence[str]) -> Piece:
    """Everything that came out, put together."""
    pieces = [
        reader.read(part, FinishReason.STOP if index + 1 == len(parts) else None)
        for index, part in enumerate(parts)
    ]
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(call for piece in pieces for call in piece.calls),
        "".join(piece.thought for piece in pieces),
    )


def plain(is_open: bool) -> ThoughtReader:
    return ThoughtReader(PlainReader(), is_open=is_open)


def calling(is_open: bool) -> ThoughtReader:
    numbers = iter(range(100))
    return ThoughtReader(HermesReader(new_id=lambda: f"call_{next(numbers)}"), is_open=is_open)


@pytest.mark.parametrize(("is_open", "text", "thought", "answer"), CASES)
def test_what_comes_first_between_the_tags_is_the_thought(
    is_open: bool, text: str, thought: str, answer: str
) -> None:
    for parts in [text], list(text) or [""], [text, ""]:
        assert read(plain(is_open), parts) == Piece(answer, (), thought)


_WRITTEN = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<", "</", "<think", "think>", " ", "\n", "a", CALL, "<tool_call>", "é"]
    ),
    max_size=12,
).map("".join)


@given(st.booleans(), _WRITTEN | st.sampled_from([case[1] for case in CASES]), st.data())
def test_cuts_change_nothing(is_open: bool, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for reader in (plain, calling):
        assert read(reader(is_open), parts) == read(reader(is_open), [text])


@given(st.booleans(), _WRITTEN)
def test_nothing_waits_but_a_tags_beginning(is_open: bool, text: str) -> None:
    """And white space around it. What has come is never taken back."""
    so_far, ended = plain(is_open).read(text, None), plain(is_open).read(text, FinishReason.STOP)
    for came, whole in ((so_far.thought, ended.thought), (so_far.text, ended.text)):
        assert whole.startswith(came)
        waits = whole.removeprefix(came).strip()
        assert any(tag.startswith(waits) and tag != waits for tag in THOUGHT_TAGS)


def test_no_call_is_found_in_a_thought() -> None:
    answer = read(calling(False), [f"<think>I could use {CALL} but no</think>\n\nNo call"])
    assert answer == Piece("No call", (), f"I could use {CALL} but no")
    both = read(calling(True), [f"maybe {CALL}</think>{CALL}"])
    assert (both.thought, both.text, [call.name for call in both.calls]) == (f"maybe {CALL}", "", ["weather"])


def test_it_is_told_from_the_template_who_thinks() -> None:
    assert thinks(THINKING)
    assert thinks("{{ message.content.split('</think>')[-1] }}")
    for template in (CHATML, HERMES, None):
        assert not thinks(template)


def test_it_is_told_from_the_prompts_end_that_a_thought_is_open() -> None:
    for end, is_open in (
        ("assistant\n<think>\n", True),
        ("<think>", True),
        ("<think>\n\n</think>\n\n", False),
        ("a<think>b", False),
        ("assistant\n", False),
        ("", False),
    ):
        assert ends_in_thought(end) == is_open


@pytest.mark.parametrize("is_open", [True, False])
def test_why_an_answer_ends_is_told_to_what_reads_it(is_open: bool) -> None:
    """Also where the thought ended in the same piece: a call that was cut off behind it is one."""
    text = ("" if is_open else "<think>") + 'hm</think><tool_call>{"name": "f", "arguments": {"a'
    cut = calling(is_open).read(text, FinishReason.LENGTH)
    assert (cut.thought, [(call.name, call.arguments) for call in cut.calls]) == ("hm", [("f", '{"a')])
    assert not calling(is_open).read(text, FinishReason.STOP).calls
