"""Contents apart from what was before them: equal for equal tokens, apart by salt, bounded."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from router.insight.content_sketch import BlockKeys, ContentSketch
from router.insight.held_memory import as_words

SIZE = 4
SECRET = b"a test's sixteen bytes"  # in a small table two of a drawn one's places are the same now and then


def keys(sketch: ContentSketch, tokens: list[int], hints: list[int], salt: str = "") -> BlockKeys:
    return sketch.keys(array("i", tokens), as_words(hints), 0, salt)  # type: ignore[arg-type]


def seen(sketch: ContentSketch, tokens: list[int], hints: list[int], salt: str = "") -> list[str]:
    """What is known of each block."""
    found = sketch.look(keys(sketch, tokens, hints, salt))
    assert (np.sum(np.stack(found), axis=0) <= 1).all()
    names = []
    for same, diverged, other in zip(*found, strict=True):
        names.append("same" if same else "diverged" if diverged else "other salt" if other else "new")
    return names


def test_blocks_are_told_by_content_place_and_salt() -> None:
    sketch = ContentSketch(SIZE, num_slots=1 << 10, secret=SECRET)
    sketch.record(keys(sketch, [1, 2, 3, 4, 5, 6, 7, 8], [11, 12]))
    assert seen(sketch, [1, 2, 3, 4, 5, 6, 7, 8], [11, 12]) == ["same", "same"]
    assert seen(sketch, [9, 9, 9, 9, 5, 6, 7, 8], [21, 22]) == ["new", "diverged"]
    assert seen(sketch, [5, 6, 7, 8, 1, 2, 3, 4], [31, 32]) == ["diverged", "diverged"]
    assert seen(sketch, [1, 2, 3, 4], [41], salt="x") == ["other salt"]


def test_every_token_and_its_place_count() -> None:
    sketch = ContentSketch(SIZE, num_slots=1 << 12, secret=SECRET)
    sketch.record(keys(sketch, [0, 0, 0, 1], [1]))
    for other in ([0, 0, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 2], [1, 0, 0, 1]):
        assert seen(sketch, other, [1]) == ["new"], other


def test_random_contents_do_not_collide() -> None:
    sketch = ContentSketch(SIZE, num_slots=1 << 14, secret=SECRET)
    rng = random.Random(1)
    sketch.record(keys(sketch, [rng.randrange(1000) for _ in range(SIZE * 4000)], list(range(4000))))
    fresh = [1000 + rng.randrange(1000) for _ in range(SIZE * 4000)]
    assert seen(sketch, fresh, list(range(4000))).count("new") == 4000


def test_the_newest_wins_and_nothing_grows() -> None:
    sketch = ContentSketch(SIZE, num_slots=1 << 8, secret=SECRET)
    before = sketch.num_bytes
    rng = random.Random(1)
    for round_ in range(20):
        tokens = [rng.randrange(1000) for _ in range(SIZE * 100)]
        hints = [1000 * round_ + index for index in range(100)]
        sketch.record(keys(sketch, tokens, hints))
    assert sketch.num_bytes == before == 8 << 8
    assert 0 < seen(sketch, tokens, hints).count("same") <= 100


def test_secrets_are_drawn_so_places_cannot_be_chosen() -> None:
    one, two = ContentSketch(SIZE), ContentSketch(SIZE)
    assert (keys(one, [1, 2, 3, 4], [1]).entries != keys(two, [1, 2, 3, 4], [1]).entries).any()
    fixed = [ContentSketch(SIZE, secret=SECRET) for _ in range(2)]
    first, second = (keys(each, [1, 2, 3, 4], [1]).entries for each in fixed)
    assert (first == second).all()


def test_a_lone_surrogate_is_a_salt_like_any_other() -> None:
    sketch = ContentSketch(SIZE, num_slots=1 << 8, secret=SECRET)
    sketch.record(keys(sketch, [1, 2, 3, 4], [1], salt="\ud800"))
    assert seen(sketch, [1, 2, 3, 4], [1], salt="\ud800") == ["same"]


def test_no_blocks_are_no_trouble() -> None:
    sketch = ContentSketch(SIZE, num_slots=1 << 8, secret=SECRET)
    empty = keys(sketch, [1, 2], [])
    sketch.record(empty)
    assert seen(sketch, [1, 2], []) == []


@pytest.mark.parametrize("num_slots", [0, 1, 1000])
def test_a_size_that_is_no_power_of_two_is_refused(num_slots: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        ContentSketch(SIZE, num_slots=num_slots)
