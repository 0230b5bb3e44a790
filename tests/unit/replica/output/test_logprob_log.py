"""Each log probability is sent once, with its token; a prompt's together, when they are whole."""

from __future__ import annotations

from array import array

import pytest

from cache.messages import Logprobs
from replica.output.logprob_log import LogprobLog


def found(*values: float) -> Logprobs:
    return Logprobs(0, array("f", values), array("i"), array("f"))


def test_drawn_ones_leave_with_their_tokens() -> None:
    log = LogprobLog(0)
    assert not log.scores_prompt
    assert log.take_drawn(0) is None
    for value in (1.0, 2.0, 3.0):
        log.add_drawn(found(value))
    first, rest = log.take_drawn(2), log.take_drawn(5)
    assert first is not None
    assert rest is not None
    assert (first.chosen.tolist(), rest.chosen.tolist()) == ([1, 2], [3])
    assert log.take_prompt() is None


def test_a_prompt_begun_anew_is_told_once_and_whole() -> None:
    log = LogprobLog(4)
    log.add_prompt(0, found(1, 2))
    assert log.scores_prompt
    assert log.take_prompt() is None
    log.add_prompt(0, found(3, 4, 5))  # preempted, and computed in other chunks
    log.add_prompt(3, found(6))
    assert not log.scores_prompt
    whole = log.take_prompt()
    assert whole is not None
    assert whole.chosen.tolist() == [3, 4, 5, 6]
    assert log.take_prompt() is None


def test_a_chunk_left_out_is_noticed() -> None:
    log = LogprobLog(4)
    with pytest.raises(AssertionError, match="left out"):
        log.add_prompt(1, found(1))
