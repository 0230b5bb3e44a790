"""Tokens drawn from all logits, or from what a head that screens has found of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from replica.layers.screened_head import RowsAnswered, RowsAsked
from replica.runners.drawer import Drawer
from tests.fakes.steps import CPU, scheduled

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [9.0, 0.0, 0.0, 0.0], [1.0, 0.0, 2.0, 8.0]])


class Structure:
    """Lets 0 and 2 come next."""

    num_words = 1

    def fill(self, words: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        words[0] = 0b101


# A decode; a prompt that goes on in the next step; and a decode in a structure.
STEP = [
    scheduled("a", [0], 3, 1),
    scheduled("b", [1], 0, 2, num_tokens=4),
    replace(scheduled("c", [2], 3, 1), structure=Structure()),  # type: ignore[arg-type]
]


class Head:
    """Screens, says what it is told to say, and remembers what it was asked."""

    def __init__(self, *, screens: bool, answered: RowsAnswered | None) -> None:
        self._screens, self._answered = screens, answered
        self.asked: list[RowsAsked] = []

    def screens(self, asked: RowsAsked, num_rows: int) -> bool:
        assert num_rows == len(STEP)
        self.asked.append(asked)
        return self._screens

    def answer(self, asked: RowsAsked, forward: Callable[[], torch.Tensor]) -> RowsAnswered | None:
        forward()
        return self._answered


def drawn(head: Head | None) -> tuple[list[int | None], int]:
    """Their tokens, and how many forwards these took."""
    forwards: list[None] = []

    def forward() -> torch.Tensor:
        forwards.append(None)
        return LOGITS

    drawer = Drawer(head, frozenset(), CPU)  # type: ignore[arg-type]
    return list(drawer.compute(STEP, forward).take().tokens), len(forwards)


@pytest.mark.parametrize(
    ("head", "num_forwards"),
    [(None, 1), (Head(screens=False, answered=None), 1), (Head(screens=True, answered=None), 2)],
    ids=["none", "does not pay", "cannot tell"],
)
def test_where_no_head_has_screened_all_logits_are_drawn_from(head: Head | None, num_forwards: int) -> None:
    assert drawn(head) == ([1, None, 2], num_forwards)


def test_what_a_head_has_computed_in_full_is_drawn_beside_what_it_has_found() -> None:
    head = Head(screens=True, answered=RowsAnswered({0: 3}, (2,), LOGITS[2:]))
    assert drawn(head) == ([3, None, 2], 1)
    assert head.asked == [RowsAsked(largest=(0,), others=(2,))]


def test_logits_that_are_there_are_drawn_from() -> None:
    assert Drawer(None, frozenset(), CPU).begin(STEP, LOGITS).take().tokens == [1, None, 2]
