"""One request for several answers, as requests for one."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from cache.messages import AnswerSoFar
from replica.engine.answers import answer_seed, answers_of, have_begun
from replica.errors import InvalidRequest
from tests.fakes.engine import make_pin, make_request

REQUEST = replace(make_request("r", [1, 2, 3], seed=7), n=3)


def so_far(*tokens: int, is_over: bool = False) -> AnswerSoFar:
    return AnswerSoFar(array("i", tokens), sent_chars=len(tokens), is_over=is_over)


def test_one_answer_is_the_request_itself() -> None:
    request = make_request("r", [1, 2], output=[3], sent_chars=1)
    assert answers_of(request) == [(0, request)]


def test_each_answer_has_its_own_name_and_seed() -> None:
    answers = answers_of(REQUEST)
    assert [(choice, answer.request_id) for choice, answer in answers] == [(0, "r"), (1, "r/1"), (2, "r/2")]
    assert answers[0][1].seed == 7
    assert len({answer.seed for _, answer in answers}) == 3
    assert all(0 <= answer.seed < 1 << 63 for _, answer in answers)
    assert not have_begun(answers)


def test_seeds_stay_what_they_are() -> None:
    """Another rule would let a replica of a newer version continue another text."""
    assert [answer_seed(7, choice) for choice in range(3)] == [7, 7643869921872156431, 3167967750878333780]


def test_an_answer_goes_on_from_what_it_has_unless_it_is_over() -> None:
    begun = replace(REQUEST, answers=(so_far(9, is_over=True), so_far(), so_far(5, 6)))
    (first, unbegun), (second, begun_answer) = answers_of(begun)
    assert (first, second) == (1, 2)
    assert unbegun.token_ids.tolist() == [1, 2, 3]
    assert begun_answer.token_ids.tolist() == [1, 2, 3, 5, 6]
    assert (begun_answer.num_prompt_tokens, begun_answer.sent_chars) == (3, 2)
    assert have_begun(answers_of(begun))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"n": 0}, "n"),
        ({"answers": (so_far(),)}, "answers"),
        ({"answers": (so_far(is_over=True),) * 3}, "answers"),
        ({"num_prompt_tokens": 2}, "token_ids"),
        ({"sent_chars": 1}, "token_ids"),
        ({"pin": make_pin("p", [1, 2, 3]).pin}, "n"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        answers_of(replace(REQUEST, **changes))
