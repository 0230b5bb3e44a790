"""When copying a block back beats computing it."""

from __future__ import annotations

import pytest

from cache.events import StepTimeModel
from replica.scheduling.copy_pace import ASK_AGAIN, CopyPace
from replica.scheduling.runner import CopyTime

# A block of 16 tokens: 16 ms, and what stands before it.
MODEL = StepTimeModel(0.0, 0.001, 1e-6, 0.0)


def pace(model: StepTimeModel | None = MODEL) -> CopyPace:
    return CopyPace(lambda: model, block_size=16, max_batched_tokens=64)


def test_until_both_are_known_it_copies() -> None:
    unmeasured, unfitted = pace(), pace(None)
    unfitted.observe(CopyTime(True, 1, 100.0))
    assert unmeasured.is_cheaper(0, 4)
    assert unfitted.is_cheaper(0, 4)


def test_a_copy_out_tells_of_copies_back_until_there_is_one() -> None:
    measured = pace()
    measured.observe(CopyTime(False, 4, 0.4))
    assert measured.block_s() == pytest.approx(0.1)
    measured.observe(CopyTime(True, 2, 0.1))
    assert measured.block_s() == pytest.approx(0.05)


def test_the_longer_the_context_the_sooner_copying_pays() -> None:
    """Of 4 blocks after 1,000 tokens: 64 ms and 66 ms of attention; after none 64 and 2."""
    measured = pace()
    measured.observe(CopyTime(True, 1, 0.02))
    assert not measured.is_cheaper(0, 4)
    assert measured.is_cheaper(1000, 4)


def test_the_latest_copies_count_most() -> None:
    measured = pace()
    for _ in range(50):
        measured.observe(CopyTime(True, 1, 1.0))
    for _ in range(50):
        measured.observe(CopyTime(True, 1, 0.001))
    assert measured.block_s() == pytest.approx(0.001, rel=10)
    assert measured.is_cheaper(0, 4)


def test_after_many_refusals_it_is_tried_again() -> None:
    """Nothing else would show that copies have become faster. Once: then it is known how fast they are."""
    measured = pace()
    for _ in range(2):
        measured.observe(CopyTime(True, 1, 1.0))
        for _ in range(ASK_AGAIN):
            assert not measured.is_cheaper(0, 4)
            measured.refused()
        measured.observe(CopyTime(False, 1, 1.0))  # a copy out is not what was asked for
        assert measured.is_cheaper(0, 4)


def test_to_be_asked_is_no_refusal() -> None:
    """Whoever waits is looked up when it comes, and again each time that it might start."""
    measured = pace()
    measured.observe(CopyTime(True, 1, 1.0))
    assert not any(measured.is_cheaper(0, 4) for _ in range(3 * ASK_AGAIN))
