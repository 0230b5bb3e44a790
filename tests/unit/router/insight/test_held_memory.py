"""A bounded memory: what it may forget, and how often it remembers what never was."""

from __future__ import annotations

import numpy as np
import pytest

from router.insight.held_memory import HeldMemory, Words, as_words


def words(count: int, seed: int) -> Words:
    return np.random.default_rng(seed).integers(0, 2**64, size=count, dtype=np.uint64)


def test_it_knows_what_was_recorded_and_nothing_else() -> None:
    memory = HeldMemory(1 << 12)
    held, other = words(500, 1), words(500, 2)
    assert not memory.knows(held).any()
    memory.record(held)
    assert memory.knows(held).all()
    assert memory.knows(other).mean() < 0.02


def test_at_capacity_it_is_wrong_about_one_in_a_hundred_at_most() -> None:
    memory = HeldMemory(1 << 14)
    memory.record(words(1 << 14, 1))
    assert memory.knows(words(20_000, 2)).mean() < 0.012


def test_the_oldest_are_forgotten() -> None:
    memory = HeldMemory(1 << 10)
    first = words(400, 1)
    memory.record(first)
    for seed in range(2, 8):
        memory.record(words(400, seed))
    assert memory.knows(first).mean() < 0.05
    assert memory.knows(words(400, 7)).all()


def test_it_never_grows() -> None:
    memory = HeldMemory(1 << 10)
    before = memory.num_bytes
    for seed in range(50):
        memory.record(words(1000, seed))
    assert memory.num_bytes == before == 16 << 10


def test_hints_over_the_whole_range_are_words() -> None:
    assert as_words([]).shape == (0,)
    assert as_words([0, 2**64 - 1]).tolist() == [0, 2**64 - 1]  # type: ignore[list-item]


@pytest.mark.parametrize("capacity", [0, 1, 1000])
def test_a_capacity_that_is_no_power_of_two_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        HeldMemory(capacity)
