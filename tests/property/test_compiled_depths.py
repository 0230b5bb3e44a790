"""How deep a chain is held is the same found in C as in Python, and as walked, whatever is guessed."""

from __future__ import annotations

import random
import sys
from array import array

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from router.index.packed_table import PackedTable

compiled = pytest.importorskip("router.native.depths", reason="not compiled: no C compiler there")

HASHING = (7, 3, 1, 0, 0, 1)  # of one segment of two slots
TWO = memoryview(array("Q", [5, 6]))
MEMBERS = (0, 1, 62, 63, 64, 100, 127, 128, 1023, 1024)  # of one word, two, three, sixteen and too many


def walked(table: PackedTable, chain: memoryview[int], members: int) -> list[tuple[int, int]]:
    """One step after another."""
    found = []
    for depth, hint in enumerate(chain):
        held = members & table.get(hint)
        if held != members and depth:
            found.append((depth, members & ~held))
        members = held
    return [*found, (len(chain), members)] if members else found


@given(
    seed=st.integers(0, 2**32),
    num_others=st.integers(0, 500),
    highest=st.sampled_from(MEMBERS),
    depths=st.dictionaries(st.sampled_from(MEMBERS), st.integers(0, 40)),
    num_hints=st.integers(1, 40),
    asked=st.sets(st.sampled_from([*MEMBERS, 7])),
    guesses=st.lists(st.integers(-2, 41), max_size=9),
    stride=st.integers(1, 3),
)
def test_as_in_python_and_as_walked(
    seed: int,
    num_others: int,
    highest: int,
    depths: dict[int, int],
    num_hints: int,
    asked: set[int],
    guesses: list[int],
    stride: int,
) -> None:
    rng = random.Random(seed)
    table = PackedTable(10_000, segment_bits=4, rng=rng)
    hints = [rng.getrandbits(64) for _ in range(40)]
    table.add([rng.getrandbits(64) for _ in range(num_others)], 63)
    for member, depth in depths.items():
        if member <= highest:
            table.add(hints[:depth], member)
    spread = array("Q", [word for hint in hints for word in (hint, *[0] * (stride - 1))])
    chain = memoryview(spread)[::stride][:num_hints]
    members = sum(1 << member for member in asked)
    found = table.depths(chain, members, tuple(guesses))
    event(f"{table.num_words} words")
    assert found == table.interpreted_depths(chain, members, tuple(guesses))
    assert found == table.depths(chain.tolist(), members, tuple(guesses)), "of a list it is found in Python"
    assert found == walked(table, chain, members)


@given(
    seed=st.integers(0, 2**32),
    held=st.dictionaries(st.sampled_from(MEMBERS), st.sets(st.integers(0, 19)), min_size=1),
    guesses=st.lists(st.integers(-2, 21), max_size=9),
)
def test_holes_are_taken_as_in_python(seed: int, held: dict[int, set[int]], guesses: list[int]) -> None:
    """Such as an event that is lost leaves: what is found then follows from where was looked."""
    rng = random.Random(seed)
    table = PackedTable(10_000, segment_bits=4, rng=rng)
    chain = memoryview(array("Q", [rng.getrandbits(64) for _ in range(20)]))
    for member, places in held.items():
        table.add([chain[place] for place in sorted({0, *places})], member)
    members = sum(1 << member for member in held)
    found = table.depths(chain, members, tuple(guesses))
    assert found == table.interpreted_depths(chain, members, tuple(guesses))


def test_more_members_than_a_word_has_bits_are_found_too() -> None:
    table, chain = PackedTable(100), memoryview(array("Q", [3, 4, 5]))
    everybody = 1 << 64 | 1
    table.add([3, 4, 5], 0)
    assert table.depths(chain, everybody) == [(3, 1)], "whose word is not there yet has nothing"
    table.add([3, 4], 64)
    assert table.depths(chain, everybody) == [(2, 1 << 64), (3, 1)]
    table.add([3], 1023)
    assert table.depths(chain, everybody | 1 << 1023) == [(1, 1 << 1023), (2, 1 << 64), (3, 1)]


def test_sets_of_more_words_than_are_matched_in_c_are_found_in_python() -> None:
    table, chain = PackedTable(100), memoryview(array("Q", [3, 4, 5]))
    table.add([3, 4, 5], 0)
    table.add([3, 4], 64 * compiled.MOST_WORDS)
    found = table.depths(chain, 1 << 64 * compiled.MOST_WORDS | 1)
    assert found == [(2, 1 << 64 * compiled.MOST_WORDS), (3, 1)]


def test_more_guesses_than_are_tried_in_c_are_tried_in_python() -> None:
    """Where there are holes, what is found follows from where was looked."""
    table, chain = PackedTable(100), memoryview(array("Q", [3, 4, 5, 6, 7]))
    table.add([3, 5], 0)
    assert table.depths(chain, 1) == [(3, 1)]
    assert table.depths(chain, 1, (0,) * (compiled.MOST_GUESSES - 1) + (1,)) == [(1, 1)]
    assert table.depths(chain, 1, (0,) * compiled.MOST_GUESSES + (1,)) == [(1, 1)]


@pytest.mark.parametrize(
    ("chain", "guesses", "hashing", "memory", "error", "says"),
    [
        (memoryview(b""), (), HASHING, TWO, ValueError, "64-bit numbers"),
        (memoryview(array("Q")), (), HASHING, TWO, ValueError, "no hints"),
        (TWO, (), HASHING, TWO[:1], ValueError, "not the table's own"),
        (TWO, (), (0, *HASHING[1:]), TWO, ValueError, "not the table's own"),
        (TWO, (), (*HASHING[:5], 0), TWO, ValueError, "not the table's own"),
        (TWO, (), HASHING[:5], TWO, TypeError, "length"),
        (TWO, (2**70,), HASHING, TWO, OverflowError, "too (big|large)"),
        (TWO, (0,) * 8, HASHING, TWO, ValueError, "8 guesses: takes up to 7"),
        (TWO, [], HASHING, TWO, TypeError, "tuple"),
        (5, (), HASHING, TWO, TypeError, "bytes-like"),
    ],
)
def test_what_is_no_table_is_an_error_and_nothing_is_kept(
    chain: memoryview[int],
    guesses: tuple[int, ...],
    hashing: tuple[int, int, int, int, int, int],
    memory: memoryview[int],
    error: type[Exception],
    says: str,
) -> None:
    before = sys.getrefcount(TWO), sys.getrefcount(chain)
    for _ in range(3):
        with pytest.raises(error, match=says):
            compiled.depths(chain, 1, guesses, hashing, 9, memory, (memory,))
    del _
    assert (sys.getrefcount(TWO), sys.getrefcount(chain)) == before


def test_of_what_is_found_nothing_is_kept() -> None:
    def found_often() -> None:
        for _ in range(1000):
            assert compiled.depths(TWO, 4 << 64 | 1, (), HASHING, 9, TWO, (TWO, TWO)) == [
                (1, 1),
                (2, 4 << 64),
            ]

    found_often()
    before = sys.getallocatedblocks(), sys.getrefcount(TWO)
    found_often()
    assert sys.getallocatedblocks() - before[0] < 100
    assert sys.getrefcount(TWO) == before[1]


@pytest.mark.parametrize(
    ("members", "words", "error", "says"),
    [
        (1, (), ValueError, "1 to 16 words"),
        (1, (TWO,) * 17, ValueError, "1 to 16 words"),
        (1, (TWO, TWO[:1]), ValueError, "not the table's own"),
        (1, (TWO, memoryview(b"ab")), ValueError, "64-bit numbers"),
        (1, [TWO], TypeError, "tuple"),
        ("1", (TWO,), TypeError, "int"),
    ],
)
def test_words_that_are_none_are_an_error_and_nothing_is_kept(
    members: int, words: tuple[memoryview[int], ...], error: type[Exception], says: str
) -> None:
    before = sys.getrefcount(TWO)
    for _ in range(3):
        with pytest.raises(error, match=says):
            compiled.depths(TWO, members, (), HASHING, 9, TWO, words)
    del _
    assert sys.getrefcount(TWO) == before
