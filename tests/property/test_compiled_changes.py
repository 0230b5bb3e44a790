"""What C does to a packed table is what Python does; of memory that is no table's it does nothing.

That both are a dict of sets is said by `test_packed_table.py`.
"""

from __future__ import annotations

import random
import sys
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.index.packed_table import FEW, Change, PackedTable

compiled = pytest.importorskip("router.native.changes", reason="not compiled: no C compiler there")

MEMBERS = (0, 1, 5, 64, 130)  # in three words


@given(
    seed=st.integers(0, 2**32),
    max_entries=st.sampled_from([5, 40, 150, 1000]),
    most=st.sampled_from([3, 12, 40]),
    num_hints=st.sampled_from([20, 200]),
)
@settings(max_examples=25)
def test_changes_are_the_same_one_by_one_in_python(
    seed: int, max_entries: int, most: int, num_hints: int
) -> None:
    """The same answers, and the same slots to the bit, after each. Segments of 16 slots."""
    rng = random.Random(f"hints {seed}")  # the tables' own numbers, drawn again, might mean an empty slot
    in_c, in_python = [PackedTable(max_entries, segment_bits=4, rng=random.Random(seed)) for _ in range(2)]
    universe = [rng.getrandbits(64) for _ in range(num_hints)]
    for _ in range(60):
        hints, member = rng.choices(universe, k=rng.randrange(most)), rng.choice(MEMBERS)
        if rng.random() < 0.6:
            in_python._reach(member)
            assert in_c.add(hints, member) == in_python._add_each(hints, member)
        elif member // 64 < in_python.num_words:
            assert in_c.discard(hints, member) == in_python._discard_each(hints, member)
        ours, theirs = in_c._at, in_python._at
        slots = ours.num_segments << ours.bits
        assert (ours.num_segments, ours.num_entries) == (theirs.num_segments, theirs.num_entries)
        assert ours.keys[:slots].tolist() == theirs.keys[:slots].tolist()
        for word, other in zip(ours.words, theirs.words, strict=True):
            assert word[:slots].tolist() == other[:slots].tolist()
        assert ours._ghosts.tolist() == theirs._ghosts.tolist()
        assert ours._used.tolist() == theirs._used.tolist()


def test_sets_of_more_words_than_c_takes_are_changed_in_python() -> None:
    table, member = PackedTable(100), 64 * compiled.MOST_WORDS
    assert table.add([3, 4, 5], member - 1)[0] == Change(3, 3 ^ 4 ^ 5)
    assert table._at.takes_marks
    assert table.add([3, 4], member)[0] == Change(2, 3 ^ 4)
    assert not table._at.takes_marks
    assert table.get(3) == 1 << member | 1 << member - 1
    assert table.discard([3, 5], member) == (Change(1, 3), Change(1, 5))


def test_where_a_table_is_full_the_first_are_taken() -> None:
    table = PackedTable(2)
    assert table.add([5, 6, 5, 7, 8], 0) == (Change(2, 5 ^ 6), Change(2, 7 ^ 8))
    assert table.add([6, 7], 1) == (Change(1, 6), Change(1, 7))
    assert table.discard([5, 9], 0) == (Change(1, 5), Change(1, 9))
    assert table.discard([5, 6], 1) == (Change(1, 6), Change(1, 5))
    assert (table.get(6), table.num_entries) == (1, 1)
    assert table.add([5, 7], 0) == (Change(1, 5), Change(1, 7)), "a ghost takes room, too"


def test_many_are_changed_as_arrays_and_are_there_for_few() -> None:
    table = PackedTable(10_000)
    hints = list(range(1, FEW + 2))
    assert table.add(hints, 7)[0].num_hints == FEW + 1
    assert table.add(hints[:FEW], 7)[0].num_hints == 0
    assert table.discard(hints[1:], 7)[0].num_hints == FEW
    assert table.discard(hints, 7)[0] == Change(1, 1)


def table(**changes: Any) -> dict[str, Any]:
    """One segment of two slots, both empty, for two words."""
    slots = np.zeros((3, 2), np.uint64)
    slots[0] = 9
    keys, *words = [memoryview(column) for column in slots]
    counts = [np.zeros(1, np.int64) for _ in range(2)]
    return {
        "keys": array("Q", [5]),
        "bit": 0,
        "hashing": (7, 3, 1, 0, 0, 1),
        "empty": 9,
        "slots": keys,
        "words": tuple(words),
        "used": counts[0],
        "ghosts": counts[1],
        "num_entries": 0,
    } | changes


def arguments(of: dict[str, Any]) -> tuple[Any, ...]:
    keys, bit, *all_of_it = of.values()
    return keys, bit, tuple(all_of_it)


def read_only(numbers: memoryview[int] | np.ndarray[Any, Any]) -> memoryview[int]:
    return memoryview(numbers).toreadonly()


def memory_of(given_in: dict[str, Any]) -> list[Any]:
    return [
        each
        for each in (*given_in.values(), *given_in["words"])
        if isinstance(each, memoryview | array | np.ndarray)
    ]


SOUND = table()
ONE = memoryview(np.zeros(1, np.uint64))
UNSOUND: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"keys": [5]}, TypeError),
    ({"keys": array("I", [5])}, ValueError),
    ({"bit": -1}, ValueError),
    ({"bit": 128}, ValueError),
    ({"hashing": (0, 3, 1, 0, 0, 1)}, ValueError),
    ({"hashing": (7, 3, 1, 0, 0, 0)}, ValueError),
    ({"hashing": (7, 3, 1, 1, 1, 1)}, ValueError),
    ({"hashing": (7, 3, 1, 1, 0, 2)}, ValueError),
    ({"hashing": (7, 3, 1)}, TypeError),
    ({"slots": ONE}, ValueError),
    ({"slots": read_only(SOUND["slots"])}, BufferError),
    ({"words": (SOUND["words"][0], ONE)}, ValueError),
    ({"words": (SOUND["words"][0], None)}, TypeError),
    ({"words": (read_only(SOUND["words"][0]),)}, BufferError),
    ({"words": ()}, ValueError),
    ({"words": (SOUND["words"][0],) * 17}, ValueError),
    ({"words": list(SOUND["words"])}, TypeError),
    ({"used": np.zeros(0, np.int64)}, ValueError),
    ({"used": read_only(SOUND["used"])}, BufferError),
    ({"ghosts": np.zeros(0, np.int64)}, ValueError),
    ({"ghosts": None}, TypeError),
    ({"num_entries": None}, TypeError),
]


@pytest.mark.parametrize(("changes", "error"), UNSOUND)
@pytest.mark.parametrize("verb", ["add", "discard"])
def test_what_is_no_table_is_an_error_and_nothing_is_kept(
    verb: str, changes: dict[str, Any], error: type[Exception]
) -> None:
    given_in = SOUND | changes
    memory = memory_of(given_in)
    before = [sys.getrefcount(each) for each in memory]
    limits = (4, 4, 2) if verb == "add" else ()
    for _ in range(3):
        with pytest.raises(error):
            getattr(compiled, verb)(*arguments(given_in), *limits)
    del _
    assert [sys.getrefcount(each) for each in memory] == before
    assert SOUND["slots"].tolist() == [9, 9]


def test_of_what_was_changed_nothing_is_kept() -> None:
    sound = table()
    memory = memory_of(sound)
    before = [sys.getrefcount(each) for each in memory]
    assert compiled.add(*arguments(sound), 4, 4, 2) == (1, 1, 1, 5)
    sound["num_entries"] = 1
    assert compiled.discard(*arguments(sound)) == (0, 1, 5, 0, 0)
    assert [sys.getrefcount(each) for each in memory] == before
    assert (sound["used"].tolist(), sound["ghosts"].tolist()) == ([1], [1])


@pytest.mark.parametrize(
    ("num_entries", "limits", "num_risen", "num_new"),
    [
        (2, (9, 9, 2), 1, 1),
        (2, (9, 2, 2), 1, 0),  # a new one is to be preceded by growing
        (2, (2, 9, 2), 0, 0),  # all the room there is is taken
        (2, (9, 9, 1), 1, 0),  # its segment is too full to find an end in it
    ],
)
def test_what_takes_more_than_a_slot_is_left(
    num_entries: int, limits: tuple[int, int, int], num_risen: int, num_new: int
) -> None:
    """Of one ghost and one free slot."""

    def haunted(key: int) -> dict[str, Any]:
        of = table(keys=array("Q", [key]), num_entries=num_entries)
        of["slots"][1], of["used"][0], of["ghosts"][0] = 5, 1, 1
        return of

    ghost, new = haunted(5), haunted(6)
    assert compiled.add(*arguments(ghost), *limits)[:2] == (num_risen, num_entries + num_risen)
    assert ghost["ghosts"].tolist() == [1 - num_risen]
    assert compiled.add(*arguments(new), *limits)[:2] == (num_new, num_entries + num_new)
    assert new["slots"].tolist() == [6 if num_new else 9, 5]
    assert new["used"].tolist() == [1 + num_new]
