"""The peak of what running sequences will hold, by hand and beside stepping through it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replica.scheduling.headroom import Growth, peak_blocks


def test_who_ends_first_leaves_its_blocks_to_the_others() -> None:
    """After one block each the first gives five back: what the other takes from then on is there."""
    assert peak_blocks([Growth(0, 1, own=5), Growth(0, 6, own=3)]) == 2
    assert peak_blocks([Growth(0, 1, own=2), Growth(0, 6, own=3)]) == 4
    assert peak_blocks([]) == 0


def test_a_prompt_half_computed_is_certain() -> None:
    assert peak_blocks([Growth(7, 1, own=0), Growth(0, 1, own=9)]) == 9


GROWTHS = st.lists(st.builds(Growth, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=8)


@given(GROWTHS)
def test_the_peak_is_that_of_going_through_it(growths: list[Growth]) -> None:
    """Answers grow block by block, together; who has reached its end gives back all that was its own."""
    peak, gone = 0, [False] * len(growths)
    for time in range(10):
        held = 0
        for growth, is_gone in zip(growths, gone, strict=True):
            held += -growth.own if is_gone else growth.certain + time
        if not all(gone):
            peak = max(peak, held)
        for index, growth in enumerate(growths):
            gone[index] |= growth.expected <= time
    assert peak_blocks(growths) == peak
