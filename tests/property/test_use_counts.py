"""Counts of uses, in dictionaries and in tables, beside plain counting; and what is no table is refused."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.types import HashHint
from router.placement.use_counts import IS_COMPILED, DictCounts, PackedCounts, UseCounts

compiled: Any = pytest.importorskip("router.native.uses") if IS_COMPILED else None
needs_c = pytest.mark.skipif(not IS_COMPILED, reason="not compiled: no C compiler there")

HINTS = st.sampled_from([0, 1, 2, 3, 5, 1 << 63, (1 << 64) - 1]).map(HashHint)
CHAINS = st.lists(HINTS, max_size=12)
ACTS = st.lists(
    st.tuples(st.just("add"), CHAINS, st.integers(1, 4)) | st.tuples(st.just("turn"), st.booleans()),
    max_size=12,
)
FORMS = [DictCounts, pytest.param(PackedCounts, marks=needs_c)]


class Plain:
    """Two lists of what was counted."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self.current: list[HashHint] = []
        self.previous: list[HashHint] = []

    def add(self, hints: list[HashHint], stride: int) -> None:
        for hint in hints[stride - 1 :: stride]:
            if hint in self.current or len(set(self.current)) < self.max_entries:
                self.current.append(hint)

    def turn(self, *, forget: bool) -> None:
        self.previous, self.current = [] if forget else self.current, []


def packed(hints: list[HashHint]) -> memoryview[int]:
    """As a Router has them: every second number of a prompt's hashes."""
    return memoryview(array("Q", [number for hint in hints for number in (hint, 7)])).cast("B").cast("Q")[::2]


@pytest.mark.parametrize("form", FORMS)
@given(acts=ACTS, max_entries=st.integers(1, 5))
def test_uses_are_what_plain_counting_says(
    form: type[DictCounts | PackedCounts], acts: list[tuple[Any, ...]], max_entries: int
) -> None:
    counts: UseCounts = form(max_entries)
    plain = Plain(max_entries)
    for number, (verb, *what) in enumerate(acts):
        if verb == "add":
            hints, stride = what
            counts.add(packed(hints) if number % 2 else hints, stride)
            plain.add(hints, stride)
        else:
            counts.turn(forget=what[0])
            plain.turn(forget=what[0])
        uses = Counter(plain.current + plain.previous)
        assert counts.num_new == len(set(plain.current)) <= max_entries
        assert counts.num_entries == counts.num_new + len(set(plain.previous))
        assert {hint: counts.total([hint]) for hint in uses} == uses
        assert counts.total(packed(list(uses))) == uses.total()
        assert counts.total([HashHint(11)]) == counts.total([]) == 0


@pytest.mark.parametrize("form", FORMS)
@given(
    agreements=st.lists(st.integers(0, 20), max_size=8),
    num_asked=st.integers(0, 20),
    stride=st.integers(1, 4),
    least=st.floats(0.1, 5.0),
)
def test_leading_ones_are_those_that_so_many_used(
    form: type[DictCounts | PackedCounts],
    agreements: list[int],
    num_asked: int,
    stride: int,
    least: float,
) -> None:
    """Of chains, each of which begins like the one that is asked for and goes on otherwise."""
    asked = [HashHint(1000 + index) for index in range(num_asked)]
    counts = form(1000)
    for number, agreement in enumerate(agreements):
        if number == len(agreements) // 2:
            counts.turn(forget=False)
        others = [HashHint(2000 + 20 * number + index) for index in range(5)]
        counts.add(packed([*asked[:agreement], *others]), stride)
    ends = range(stride, num_asked + 1, stride)
    wanted = stride * sum(sum(agreement >= end for agreement in agreements) >= least for end in ends)
    assert counts.leading(packed(asked), stride, least) == wanted
    assert counts.leading(asked, stride, least) == wanted


def table(num_slots: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.zeros((num_slots, 2), np.uint64)


NUMBERS = array("Q", [1, 2, 3])
READ_ONLY = table(4)
READ_ONLY.flags.writeable = False


@needs_c
@pytest.mark.parametrize(
    ("function", "arguments", "error"),
    [
        ("add", (table(3), 1, 0, 1, NUMBERS, 1), ValueError),  # no power of two
        ("add", (table(0), 1, 0, 0, NUMBERS, 1), ValueError),
        ("add", (np.zeros(17, np.uint8), 1, 0, 0, NUMBERS, 1), ValueError),
        ("add", (table(4), 1, 0, 4, NUMBERS, 1), ValueError),  # no slot would be free
        ("add", (table(4), 1, 0, 2, NUMBERS, 0), ValueError),
        ("add", (table(4), 1, 0, 2, array("I", [1]), 1), ValueError),
        ("add", (table(4), 1, 0, 2, [1], 1), TypeError),
        ("add", (READ_ONLY, 1, 0, 2, NUMBERS, 1), ValueError),
        ("add", (None, 1, 0, 2, NUMBERS, 1), TypeError),
        ("leading", ((table(4), table(3)), 1, NUMBERS, 1, 1.0), ValueError),
        ("leading", ((table(4),) * 3, 1, NUMBERS, 1, 1.0), ValueError),
        ("leading", ((table(4),), 1, NUMBERS, 0, 1.0), ValueError),
        ("leading", ((table(4),), 1, [1], 1, 1.0), TypeError),
        ("leading", ([table(4)], 1, NUMBERS, 1, 1.0), TypeError),
        ("total", ((table(4), None), 1, NUMBERS), TypeError),
        ("total", ((table(4),) * 3, 1, NUMBERS), ValueError),
        ("total", ((table(4),), 1, None), TypeError),
    ],
)
def test_what_is_no_table_is_refused(
    function: str, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    """And held on to by nobody."""
    parts = [part for each in arguments for part in (each if isinstance(each, tuple) else (each,))]
    memory = [part for part in parts if isinstance(part, np.ndarray | array)]
    before = [sys.getrefcount(each) for each in memory]
    with pytest.raises(error):
        getattr(compiled, function)(*arguments)
    assert [sys.getrefcount(each) for each in memory] == before


@needs_c
def test_what_was_asked_is_held_on_to_by_nobody() -> None:
    memory = [table(4), table(4), array("Q", [1, 2, 3])]
    before = [sys.getrefcount(each) for each in memory]
    now, then, numbers = memory
    assert compiled.add(now, 1, 0, 2, numbers, 1) == 2
    assert compiled.leading((now, then), 1, numbers, 1, 1.0) == 2
    assert compiled.total((now, then), 1, numbers) == 2
    del now, then, numbers
    assert [sys.getrefcount(each) for each in memory] == before


@needs_c
def test_a_table_without_a_free_slot_is_searched_once() -> None:
    full = np.ones((4, 2), np.uint64)
    assert compiled.total((full,), 1, array("Q", [1])) == 1
    assert compiled.leading((full,), 1, array("Q", [9]), 1, 5.0) == 0
    assert compiled.total((table(1),), 1, NUMBERS) == 0
