"""Columns in reserved memory: one memory seen two ways, and given back without touching its neighbours."""

from __future__ import annotations

import mmap

import numpy as np

from router.index.columns import Columns

ROWS = 4 * mmap.PAGESIZE // 16  # of two columns: four pages


def test_arrays_and_views_are_the_same_numbers_and_columns_do_not_overlap() -> None:
    (keys, key_view), (words, word_view) = Columns(ROWS, 2).columns
    assert len(keys) == len(word_view) == ROWS
    assert not keys.any()
    keys[7], word_view[7] = 2**64 - 1, 5
    assert (key_view[7], int(words[7])) == (2**64 - 1, 5)
    assert key_view[8] == word_view[6] == 0


def test_released_rows_can_be_written_anew_and_others_keep_their_numbers() -> None:
    memory = Columns(ROWS, 2)
    keys, _ = memory.columns[0]
    keys[:] = np.arange(ROWS, dtype=np.uint64)
    first, count = ROWS // 4, ROWS // 4 + 3  # a page, and a part of the next one
    memory.release(first, count)
    kept = np.r_[0:first, first + count : ROWS]
    assert (keys[kept] == kept).all()
    keys[first : first + count] = 9
    assert (keys[first : first + count] == 9).all()
    assert (keys[kept] == kept).all()


def test_releasing_less_than_a_page_does_nothing() -> None:
    memory = Columns(ROWS, 2)
    keys, _ = memory.columns[0]
    keys[:] = 3
    memory.release(1, mmap.PAGESIZE // 16 - 2)
    assert (keys == 3).all()
