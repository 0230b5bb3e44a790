"""Which layers a part goes through, and its share of the part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.scheduling.layer_span import LayerSpan


@st.composite
def passages(draw: st.DrawFn) -> list[LayerSpan]:
    """All layers, in spans one after the other."""
    total = draw(st.integers(1, 64))
    ends = sorted(draw(st.sets(st.integers(1, total))) | {total})
    return [LayerSpan(first, end, total) for first, end in zip([0, *ends], ends, strict=False)]


@given(passages(), st.integers(0, 1000))
def test_the_spans_of_a_part_have_all_of_its_tokens(passage: list[LayerSpan], num_tokens: int) -> None:
    assert sum(span.tokens(num_tokens) for span in passage) == num_tokens
    assert sum(span.share for span in passage) == pytest.approx(1.0)
    assert [span.is_last for span in passage] == [False] * (len(passage) - 1) + [True]
