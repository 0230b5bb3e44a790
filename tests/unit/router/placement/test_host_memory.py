"""Blocks in a replica's host memory: told apart from its pool, and priced by what copying them takes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cache.block_hash import hints as to_hints
from cache.event_log import EventLog
from cache.events import FORMAT_VERSION, Digest, EventBatch, digest_of
from cache.scheduling_order import SchedulingOrder
from cache.types import BlockHash, ReplicaId, RequestId
from router.events.event_stream import EventStream
from router.index.hash_trie import HashTrie
from router.insight.accounting import Accounting, UncachedReason
from router.insight.closed_loop import DOUBT_MISSES, ClosedLoop
from router.placement.routing import RouteReason
from tests.fakes.held import HoldingRouter
from tests.fakes.router import BLOCK_SIZE, chain, info, load, query, replica_id, told
from tests.fakes.routing import RoutingBench, whole

A, B = replica_id(0), replica_id(1)
QUICK_S, SLOW_S = 1e-6, 10.0  # to copy a block: next to nothing, and longer than any prefill here
COPY_S = 0.0018  # 64 of them take shorter than 64 blocks to compute, and longer than 24 and what comes of it


def tell(
    bench: RoutingBench,
    replica: ReplicaId,
    hosted: Sequence[BlockHash],
    copy_block_s: float | None,
    host_digest: Digest | None = None,
) -> Digest | None:
    names = tuple(to_hints(hosted))
    bench.seq += 1
    said = load(copy_block_s=copy_block_s)
    digest = digest_of(names)
    return bench.routing.on_events(
        replica,
        EventBatch(FORMAT_VERSION, 1, bench.seq, (), (), digest, said, 0.0, names, host_digest or digest),
    )


@pytest.fixture
def bench() -> RoutingBench:
    return RoutingBench()


@pytest.mark.parametrize("copy_block_s", [QUICK_S, None])
def test_a_hit_in_host_memory_is_a_hit(bench: RoutingBench, copy_block_s: float | None) -> None:
    """Who has not measured its copies yet copies whatever it finds."""
    tell(bench, B, chain("q", 8), copy_block_s)
    placement = bench.routing.choose(query("q"))
    assert (placement.replica_id, placement.overlap_blocks) == (B, 8)
    assert placement.reason is RouteReason.PREFIX


def test_what_is_cheaper_to_compute_does_not_count(bench: RoutingBench) -> None:
    tell(bench, B, chain("q", 8), SLOW_S)
    bench.routing.choose(query("q"))
    [record] = bench.records
    assert all(ranked.candidate.cached_tokens == 0 for ranked in record.ranked)


def test_the_pool_is_nearer_than_host_memory(bench: RoutingBench) -> None:
    """Copying is work before the request: of two that hold a prompt, the one that need not copy it."""
    prompt = chain("q", 8)
    for hosting, other in ((A, B), (B, A)):
        bench = RoutingBench()
        tell(bench, hosting, prompt, 1e-4)
        bench.say(other, stored=prompt)
        placement = bench.routing.choose(query("q"))
        assert placement.replica_id == other
        [record] = bench.records
        assert [ranked.candidate.cached_tokens for ranked in record.ranked] == [8 * BLOCK_SIZE] * 2


def test_only_what_lies_behind_the_pool_is_copied(bench: RoutingBench) -> None:
    prompt = chain("q", 8)
    bench.say(B, stored=prompt)
    tell(bench, B, prompt[6:], SLOW_S, digest_of(to_hints(prompt[6:])))
    bench.routing.choose(query("q"))
    [record] = bench.records
    held = {ranked.candidate.replica_id: ranked.candidate.cached_tokens for ranked in record.ranked}
    assert held == {A: 0, B: 6 * BLOCK_SIZE}


def test_a_replica_is_not_doubted_for_what_nobody_had_it_copy(bench: RoutingBench) -> None:
    """It holds two blocks more than are expected to be found: it keeps its word by computing them."""
    doubted: list[ReplicaId] = []
    accounting = Accounting(BLOCK_SIZE)
    accounting.listen(ClosedLoop(BLOCK_SIZE, clock=bench.clock, doubt=doubted.append).heard)
    bench.routing.watch(accounting)
    prompt = chain("q", 8)
    bench.say(B, stored=prompt)
    tell(bench, B, prompt[6:], SLOW_S, digest_of(to_hints(prompt[6:])))
    for number in range(2 * DOUBT_MISSES):
        asked = query("q", request_id=RequestId(str(number)), excluded=frozenset({A}))
        bench.routing.choose(asked)
        bench.routing.first_token(asked.request_id, B, 6 * BLOCK_SIZE)
        bench.routing.finish(asked.request_id)
    assert {record.exact_tokens for record in bench.records} == {6 * BLOCK_SIZE}
    assert doubted == []


def test_a_full_index_asks_for_no_snapshot_because_blocks_change_tiers(bench: RoutingBench) -> None:
    """Of those that it had no room for it does not know which it has counted."""
    bench.routing._index._exact = trie = HashTrie(max_blocks=64)
    trie.add_replica(A)
    log, stream = EventLog(epoch=1), EventStream(A, bench.routing, clock=bench.clock)
    whole(stream.snapshot_slices(log.snapshot(load())))
    blocks = chain("q", 100)
    for block in blocks:
        log.stored(block)
    stream.feed_batch(log.flush(load()))
    for tell_of in (log.demoted, log.promoted, log.demoted):
        for block in reversed(blocks[20:]):
            tell_of(block)
        stream.feed_batch(log.flush(load()))
        assert not stream.needs_snapshot
        assert (trie.num_blocks(A), trie.num_refused) == (64, 36)


@pytest.mark.parametrize("is_draining", [False, True])
def test_what_is_not_worth_copying_is_evicted_and_not_elsewhere(is_draining: bool) -> None:
    """Also while not everybody can be chosen: nobody else holds it."""
    bench = RoutingBench()
    accounting = Accounting(BLOCK_SIZE)
    bench.routing.watch(accounting)
    tell(bench, B, chain("q", 8), SLOW_S)
    bench.say(A, is_draining=is_draining)
    asked = query("q", excluded=frozenset() if is_draining else frozenset({A}))
    assert bench.routing.choose(asked).replica_id == B
    bench.routing.first_token(asked.request_id, B, 0)
    uncached = accounting.totals.uncached
    assert (uncached[UncachedReason.EVICTED], uncached[UncachedReason.ELSEWHERE]) == (8 * BLOCK_SIZE, 0)


def test_tiers_that_have_drifted_are_not_believed(bench: RoutingBench) -> None:
    """The digest that is answered differs from what was told, so that a snapshot is fetched."""
    told = digest_of(to_hints(chain("q", 8)))
    assert tell(bench, B, chain("q", 8), QUICK_S) == told
    assert tell(bench, B, (), QUICK_S, Digest(3, 1)) != told
    assert bench.routing.choose(query("q")).reason is RouteReason.COLD


def test_who_would_copy_may_be_beaten_by_who_need_not(bench: RoutingBench) -> None:
    """What was decided while another was busy is decided anew when that one falls idle: the seconds that
    copying takes are a part of what it has to beat."""
    prompt = chain("q", 64)
    tell(bench, B, prompt, COPY_S)
    bench.say(A, stored=prompt[:40], queued_uncached_tokens=100_000)
    earlier = bench.routing.weigh(query("q", 64))
    assert earlier.ranking.best.replica_id == B
    bench.say(A)
    free = [state for state in bench.routing.free_replicas(0.0)[1] if state.replica_id == A]
    assert bench.routing.weigh(query("q", 64)).ranking.best.replica_id == A
    assert bench.routing.could_win(earlier, free)


@pytest.mark.parametrize("copy_block_s", [QUICK_S, SLOW_S])
def test_what_a_prompt_passes_waits_for_what_is_computed_of_it(copy_block_s: float) -> None:
    """And not for what would be, were its blocks in host memory worth copying or not."""
    bench = RoutingBench(1)
    bench.routing.update_replicas({})
    bench.routing.update_replicas({B: info(scheduling_order=SchedulingOrder.SHORTEST_PREEMPTING)})
    tell(bench, B, chain("q", 64), copy_block_s)
    bench.routing.choose(query("longer", 80))
    queued = {"queued_uncached_tokens": 1280, "num_waiting": 1, "queued": (told(80),)}
    bench.routing.on_load(B, load(copy_block_s=copy_block_s, admitted=("longer",), **queued))
    decision = bench.routing.weigh(query("q", 64))
    price = decision.ranking.best.price
    assert price is not None
    assert price.passed_s == pytest.approx(decision.prefill_s)


@pytest.mark.parametrize("copied_s", [0.01, 0.3])
def test_a_held_request_does_not_wait_for_its_own_copying(copied_s: float) -> None:
    """It is work before it on an idle replica, too: to wait until there is none were to wait for ever."""
    router = HoldingRouter()
    prompt = tuple(to_hints(chain("q", 640)))
    said, digest = load(copy_block_s=copied_s / len(prompt)), digest_of(prompt)
    router.routing.on_events(A, EventBatch(FORMAT_VERSION, 1, 1, (), (), digest, said, 0.0, prompt, digest))
    router.submit("q", 640)
    assert router.poll() == ["q"]
