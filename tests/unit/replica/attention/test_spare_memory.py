"""Memory that is given back is used again, and what is in use is nobody else's."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from replica.attention.spare_memory import REACH, SpareMemory

LIKE = torch.empty(0)
ANY = 1 << 20


def test_the_smallest_piece_that_is_large_enough_is_taken_again() -> None:
    spare = SpareMemory()
    pieces = [spare.take(LIKE, count, ANY) for count in (100, 10, 1000)]
    assert [len(piece) for piece in pieces] == [100 * REACH, 10 * REACH, 1000 * REACH]
    for piece in pieces:
        spare.give_back(piece)
    assert spare.num_bytes == sum(piece.nbytes for piece in pieces)
    assert spare.take(LIKE, 10 * REACH + 1, ANY) is pieces[0]
    assert spare.take(LIKE, 10 * REACH + 1, ANY) is pieces[2]
    assert spare.take(LIKE, 10 * REACH, ANY) is pieces[1]
    assert spare.num_bytes == 0


def test_what_is_given_back_beyond_the_limit_is_freed() -> None:
    spare = SpareMemory(max_bytes=10 * REACH * LIKE.itemsize)
    first, second = spare.take(LIKE, 10, ANY), spare.take(LIKE, 10, ANY)
    spare.give_back(first)
    spare.give_back(second)
    assert spare.num_bytes == first.nbytes
    assert spare.take(LIKE, 1, ANY) is first


def test_no_piece_is_larger_than_its_taker_may_have() -> None:
    spare = SpareMemory()
    large = spare.take(LIKE, 10, ANY)
    spare.give_back(large)
    small = spare.take(LIKE, 10, 15)
    assert len(small) == 15
    assert spare.take(LIKE, 10, len(large)) is large


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 200)), max_size=60))
def test_no_two_hold_the_same_memory(orders: list[tuple[bool, int]]) -> None:
    spare = SpareMemory(max_bytes=4_000)
    taken: list[torch.Tensor] = []
    for gives, number in orders:
        if gives and taken:
            spare.give_back(taken.pop(number % len(taken)))
        else:
            taken.append(spare.take(LIKE, number, ANY))
            assert len(taken[-1]) >= number
        assert spare.num_bytes <= 4_000
        for index, piece in enumerate(taken):
            piece.fill_(index)
        assert all((piece == index).all() for index, piece in enumerate(taken))
