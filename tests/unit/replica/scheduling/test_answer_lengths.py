"""What is expected of an answer, by hand and beside a naive mean."""

from __future__ import annotations

from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.scheduling.answer_lengths import LEAST_GUESS, REMEMBERED, AnswerLengths


def taught(lengths: list[int]) -> AnswerLengths:
    answers = AnswerLengths()
    for length in lengths:
        answers.observe(length)
    return answers


def test_while_none_has_ended_a_paragraph_is_expected() -> None:
    answers = AnswerLengths()
    assert answers.expected(0, 10_000) == LEAST_GUESS
    assert answers.expected(0, 7) == 7
    assert answers.expected(1000, 10_000) == 2000


def test_those_that_were_longer_tell() -> None:
    answers = taught([5, 100, 200])
    assert answers.expected(0, 10_000) == pytest.approx(305 / 3)
    assert answers.expected(5, 10_000) == 150
    assert answers.expected(5, 120) == 110  # the one of 200 would have been cut there
    assert answers.expected(200, 10_000) == 200 + 200


def test_old_answers_are_forgotten() -> None:
    answers = taught([1000] * REMEMBERED + [10] * REMEMBERED)
    assert answers.expected(0, 10_000) == 10


@given(st.lists(st.integers(0, 50), max_size=REMEMBERED + 40), st.integers(-3, 60), st.integers(1, 80))
def test_the_mean_of_what_followed(lengths: list[int], so_far: int, at_most: int) -> None:
    """And never less than there is already, nor more than is allowed."""
    expected = taught(lengths).expected(so_far, at_most)
    assert min(so_far, at_most) <= expected <= at_most
    longer = [min(length, at_most) for length in lengths[-REMEMBERED:] if length > so_far]
    if longer and so_far < at_most:
        assert expected == pytest.approx(mean(longer))
