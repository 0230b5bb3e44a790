"""How often newcomers have found no replica free lately."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.pricing.taken_share import OVER, TakenShare


def test_a_fleet_that_nobody_has_come_to_is_free() -> None:
    assert TakenShare().value == 0.0


def test_it_follows_those_that_came_lately() -> None:
    taken = TakenShare()
    for _ in range(10 * OVER):
        taken.note(0.0)
    assert taken.value == pytest.approx(1.0, abs=0.01)
    taken.note(1.0)
    assert taken.value == pytest.approx(1.0 - 1 / OVER, abs=0.01)


@given(st.lists(st.floats(0, 1)))
def test_it_is_a_share(parts: list[float]) -> None:
    taken = TakenShare()
    for part in parts:
        taken.note(part)
        assert 0.0 <= taken.value <= 1.0
