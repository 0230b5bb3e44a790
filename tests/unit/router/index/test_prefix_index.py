"""Replicas that tell their blocks beside replicas that do not, in one index."""

from __future__ import annotations

from collections.abc import Sequence

from cache.block_hash import hints as to_hints
from cache.events import FORMAT_VERSION, Digest, EventBatch, Load, Snapshot, digest_of
from cache.types import BlockHash, HashHint, ReplicaId, RequestId
from router.index.prefix_index import PrefixIndex
from tests.fakes.router import chain, hint_chain, info, spread

TOLD, SILENT = ReplicaId("tells its blocks"), ReplicaId("tells none")
Q, R = RequestId("q"), RequestId("r")
TTL_S = 5.0


def an_index(capacity: int = 100) -> PrefixIndex:
    index = PrefixIndex(TTL_S)
    index.add_replica(TOLD, info(num_blocks=capacity))
    index.add_replica(SILENT, info(num_blocks=capacity, has_kv_events=False))
    return index


def stored(blocks: Sequence[BlockHash]) -> EventBatch:
    hints = tuple(to_hints(blocks))
    return EventBatch(FORMAT_VERSION, 1, 1, hints, (), digest_of(hints), Load())


def snapshot(hints: Sequence[HashHint]) -> Snapshot:
    return Snapshot(FORMAT_VERSION, 1, 1, hints, Load(), digest_of(hints))


def test_both_are_matched_at_once() -> None:
    index = an_index()
    assert index.apply(TOLD, stored(chain("p", 4))) == digest_of(hint_chain("p", 4))
    index.expect(Q, SILENT, hint_chain("p", 6), now=0.0)
    assert index.match(hint_chain("p", 8)) == {TOLD: 4, SILENT: 6}
    assert index.num_exact(TOLD, hint_chain("p", 8)) == 4
    assert index.num_exact(SILENT, hint_chain("p", 8)) == 0


def test_only_what_is_imitated_outlives_the_predictions() -> None:
    index = an_index()
    index.expect(Q, TOLD, hint_chain("p", 6), now=0.0)
    index.expect(R, SILENT, hint_chain("p", 6), now=0.0)
    index.keep(Q)
    index.keep(R)
    assert index.match(hint_chain("p", 6)) == {TOLD: 6, SILENT: 6}
    index.expire(TTL_S + 0.1)
    assert index.match(hint_chain("p", 6)) == {SILENT: 6}


def test_an_imitated_cache_holds_the_output_too() -> None:
    index = an_index()
    index.expect(Q, SILENT, hint_chain("p", 2), now=0.0)
    index.served(Q, SILENT)
    index.finish(Q, hint_chain("p", 5))
    assert index.match(hint_chain("p", 9)) == {SILENT: 5}
    assert index.num_blocks(SILENT) == 5
    index.finish(Q, hint_chain("other", 5))  # nobody serves it any more
    assert index.match(hint_chain("other", 5)) == {}


def test_an_imitated_cache_is_no_larger_than_the_engines() -> None:
    index = an_index(capacity=8)
    for number in range(20):
        index.expect(RequestId(str(number)), SILENT, hint_chain(f"p{number}", 3), now=0.0)
    assert index.num_blocks(SILENT) == 8
    assert index.match(hint_chain("p19", 3)) == {SILENT: 3}
    assert index.match(hint_chain("p0", 3)) == {}


def test_events_of_one_that_tells_no_blocks_agree_with_nothing_indexed() -> None:
    """Its batches and snapshots are those of an empty cache: no drift, so no resync."""
    index = an_index()
    index.expect(Q, SILENT, hint_chain("p", 3), now=0.0)
    assert index.apply(SILENT, stored(())) == Digest()
    assert list(index.apply_in_slices(SILENT, snapshot(()))) == []
    assert index.digest(SILENT) == Digest()
    assert index.match(hint_chain("p", 3)) == {SILENT: 3}


def test_whoever_left_or_restarted_holds_nothing() -> None:
    index = an_index()
    for name in (TOLD, SILENT):
        index.expect(RequestId(name), name, hint_chain("p", 3), now=0.0)
        index.served(RequestId(name), name)
    index.forget(SILENT, info(has_kv_events=False))
    index.remove_replica(TOLD)
    assert index.match(hint_chain("p", 3)) == {}
    assert SILENT in index
    assert TOLD not in index
    index.remove_replica(SILENT)
    for name in (TOLD, SILENT):
        index.finish(RequestId(name), hint_chain("p", 4))
    assert index.match(hint_chain("p", 3)) == {}
    assert index.num_entries == 0


def test_a_request_sent_to_a_stranger_is_expected_nowhere() -> None:
    index = an_index()
    index.expect(Q, TOLD, hint_chain("p", 3), now=0.0)
    index.expect(Q, ReplicaId("of another fingerprint"), hint_chain("p", 3), now=0.0)
    assert index.match(hint_chain("p", 3)) == {}


def test_batches_that_change_nothing_sweep_out_who_has_left() -> None:
    """A fleet that only decodes asks for no match: what a replica leaves behind must not wait for one."""
    index, gone = an_index(), ReplicaId("will leave")
    index.add_replica(gone, info(num_blocks=200_000))
    index.apply(gone, EventBatch(FORMAT_VERSION, 1, 1, tuple(spread(150_000)), (), Digest(), Load()))
    index.remove_replica(gone)
    assert index.num_entries > 0
    for _ in range(100):
        index.apply(TOLD, stored([]))
    assert index.num_entries == 0
