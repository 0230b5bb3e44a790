"""A snapshot into the index, slice by slice: what is matched meanwhile, and what is left if it stops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.events import FORMAT_VERSION, Load, Snapshot, digest_of
from cache.types import HashHint
from router.index import snapshot_slices
from router.index.hash_trie import HashTrie
from router.index.snapshot_slices import replace_in_slices
from tests.fakes.router import hint_chain, replica_id

A, B = replica_id(0), replica_id(1)
OLD, NEW = hint_chain("old", 9), hint_chain("new", 9)


@pytest.fixture(autouse=True)
def small_slices() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_slices, "SLICE_BLOCKS", 2)
        yield


def a_trie(held: Sequence[HashHint] = ()) -> HashTrie:
    trie = HashTrie()
    for name in (A, B):
        trie.add_replica(name)
        trie.store(name, held)
    return trie


def snapshot(hashes: Sequence[HashHint]) -> Snapshot:
    return Snapshot(FORMAT_VERSION, 1, 1, hashes, Load(), digest_of(hashes))


def test_from_nothing_it_is_matched_as_far_as_it_has_come() -> None:
    trie = a_trie()
    matched = [trie.match(NEW).get(A, 0) for _ in replace_in_slices(trie, A, snapshot(NEW))]
    assert matched == [2, 4, 6, 8, 9]


def test_what_was_known_is_matched_until_the_whole_snapshot_is_in() -> None:
    trie = a_trie(OLD)
    for _ in replace_in_slices(trie, A, snapshot(NEW)):
        assert trie.match(OLD) == {A: 9, B: 9}
        assert not trie.match(NEW), "under no name at all"
    assert trie.match(OLD) == {B: 9}
    assert trie.match(NEW) == {A: 9}
    assert trie.digest(A) == digest_of(NEW)


def test_live_batches_after_it_change_the_new_set() -> None:
    trie = a_trie(OLD)
    for _ in replace_in_slices(trie, A, snapshot(NEW)):
        pass
    trie.remove(A, NEW[:6:-1])
    trie.store(A, OLD[:3])
    assert trie.match(NEW) == {A: 7}
    assert trie.match(OLD) == {A: 3, B: 9}


@pytest.mark.parametrize("num_steps", [1, 3, 5])
def test_closed_before_its_end_it_leaves_nothing(num_steps: int) -> None:
    trie = a_trie(OLD)
    slices = replace_in_slices(trie, A, snapshot(NEW))
    for _ in range(num_steps):
        next(slices)
    slices.close()
    while trie.is_sweeping:
        trie.expire(0.0)
    assert trie.match(OLD) == {A: 9, B: 9}
    assert trie.match(NEW) == {}
    assert trie.num_entries == 9


def test_two_at_once_do_not_mix() -> None:
    """The earlier one is abandoned, but may be closed only after the later one has begun."""
    trie = a_trie(OLD)
    earlier = replace_in_slices(trie, A, snapshot(NEW))
    next(earlier)
    other = hint_chain("other", 7)
    later = replace_in_slices(trie, A, snapshot(other))
    next(later)
    earlier.close()
    list(later)
    assert trie.digest(A) == digest_of(other)
    assert trie.match(NEW) == {}


def test_a_small_one_goes_in_at_once_and_predictions_stay() -> None:
    trie = a_trie(OLD)
    trie.predict(A, NEW, expires_at=10.0)
    assert list(replace_in_slices(trie, A, snapshot(OLD[:2]))) == []
    assert trie.match(OLD) == {A: 2, B: 9}
    assert trie.match(NEW) == {A: 9}


def test_in_a_large_index_even_a_small_one_is_gathered_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find one replica's few blocks among millions would take longer than a slice."""
    monkeypatch.setattr(snapshot_slices, "SMALL_INDEX_BLOCKS", 8)
    trie = a_trie(OLD)
    assert len(list(replace_in_slices(trie, A, snapshot(OLD[:2])))) == 1
    assert trie.match(OLD) == {A: 2, B: 9}


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_the_index_becomes_the_snapshot(old: int, shared: int, new: int) -> None:
    held = hint_chain("x", shared)
    before = [*held, *hint_chain("y", old)]
    after = [*held, *hint_chain("z", new)]
    trie = a_trie(before)
    list(replace_in_slices(trie, A, snapshot(after)))
    assert trie.digest(A) == digest_of(after)
    assert trie.digest(B) == digest_of(before)
    while trie.is_sweeping:
        trie.expire(0.0)
    assert trie.num_entries == len({*before, *after})
