"""Laws of linear hashing: homes told one by one and together agree, and a split moves only what it must."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.index.linear_hashing import LinearHashing, split_from

HINTS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=200)


def hashing_of(num_segments: int, seed: int = 1, segment_bits: int = 4) -> LinearHashing:
    hashing = LinearHashing(segment_bits, random.Random(seed))
    hashing.resize(num_segments)
    return hashing


@given(hints=HINTS, num_segments=st.integers(1, 300), seed=st.integers(0, 99))
def test_homes_are_slots_there_are_and_the_same_one_by_one(
    hints: list[int], num_segments: int, seed: int
) -> None:
    hashing, keys = hashing_of(num_segments, seed), np.array(hints, np.uint64)
    homes = [hashing.home(hint) for hint in hints]
    assert hashing.homes(keys).tolist() == homes
    assert hashing.homes_within(keys).tolist() == [home % 16 for home in homes]
    assert 0 <= min(homes) <= max(homes) < 16 * num_segments


@given(hints=HINTS, num_segments=st.integers(1, 300))
def test_a_split_takes_keys_from_one_segment_to_the_new_one(hints: list[int], num_segments: int) -> None:
    hashing = hashing_of(num_segments)
    before = [hashing.home(hint) for hint in hints]
    hashing.resize(num_segments + 1)
    for old, new in zip(before, map(hashing.home, hints), strict=True):
        assert new % 16 == old % 16, "within its segment a key's home never changes"
        assert new == old or (old // 16, new // 16) == (split_from(num_segments), num_segments)


@given(num_entries=st.integers(0, 2**24))
def test_segments_are_the_fewest_that_take_the_entries(num_entries: int) -> None:
    hashing = hashing_of(1, segment_bits=12)
    count = hashing.segments_for(num_entries)
    assert hashing.capacity(count) >= num_entries
    assert count == 1 or hashing.capacity(count - 1) < num_entries
    hashing.resize(count)
    assert hashing.full_at == hashing.capacity(count)


def test_splits_go_round_in_order() -> None:
    assert [split_from(segment) for segment in range(9)] == [0, 0, 0, 1, 0, 1, 2, 3, 0]


def test_load_at_which_a_split_is_due_rises_through_a_round_and_starts_anew() -> None:
    """From 0.55 of what there was when the round began to 0.75 of it: of all slots, 0.55 down to 0.375."""
    hashing = hashing_of(1, segment_bits=12)
    loads = [hashing.capacity(count) / (count * 4096) for count in (4, 5, 6, 7, 8)]
    assert [round(load, 3) for load in loads] == [0.55, 0.48, 0.433, 0.4, 0.55]
