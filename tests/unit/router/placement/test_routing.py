"""The decision: match, cost, pick, what events change, and what can be seen of it."""

from __future__ import annotations

import pytest

from cache.block_hash import hints as to_hints
from cache.errors import ConfigError
from cache.events import FORMAT_VERSION, Digest, Load, Snapshot, digest_of
from cache.types import BlockHash, HashHint, ReplicaId, RequestId
from router.events.event_stream import ResyncReason
from router.placement.routing import RouteQuery, RouteReason
from tests.fakes.router import BLOCK_SIZE, chain, info, load, query, replica_id
from tests.fakes.routing import RoutingBench, whole

A, B = replica_id(0), replica_id(1)


def test_a_prompt_goes_where_its_prefix_is(bench: RoutingBench) -> None:
    bench.say(B, stored=chain("q", 8))
    placement = bench.routing.choose(query("q"))
    assert placement.ranks == (B, A)
    assert placement.replica_id == B
    assert placement.overlap_blocks == 8
    assert placement.reason is RouteReason.PREFIX
    assert list(placement.block_hashes) == list(chain("q", 8))


def test_one_prompt_ten_times_stays_on_one_replica_before_any_event(bench: RoutingBench) -> None:
    """Predictions hold twins together until the engine has spoken, requests in flight or not."""
    first = bench.routing.choose(query("q", 64))
    assert first.reason is RouteReason.COLD
    for index in range(9):
        twin = bench.routing.choose(query("q", 64)._replace(request_id=RequestId(f"twin{index}")))
        assert twin.replica_id == first.replica_id
        assert twin.reason is RouteReason.PREFIX


def test_an_unconfirmed_prediction_is_forgotten(bench: RoutingBench) -> None:
    placement = bench.routing.choose(query("q"))
    assert bench.routing.statistics().index_entries == 8
    bench.routing.release(placement.request_id)
    bench.clock.advance(5.0)
    assert bench.routing.choose(query("r")).reason is RouteReason.COLD
    assert bench.routing.statistics().index_entries == 8  # of the new prompt


@pytest.mark.parametrize("holders", [[A], [A, B]], ids=["one", "all"])
def test_at_least_one_token_is_computed(bench: RoutingBench, holders: list[ReplicaId]) -> None:
    """A prompt of exactly 8 blocks hits at most 7."""
    for holder in holders:
        bench.say(holder, stored=chain("q", 8))
    placement = bench.routing.choose(query("q", num_prompt_tokens=8 * BLOCK_SIZE))
    assert placement.overlap_blocks == 7
    [record] = bench.records
    assert record.ranked[0].candidate.cached_tokens == 7 * BLOCK_SIZE


def test_a_prompt_shorter_than_a_block_is_routed_by_load(bench: RoutingBench) -> None:
    placement = bench.routing.choose(RouteQuery(RequestId("x"), (), 3))
    assert placement.reason is RouteReason.COLD
    assert placement.overlap_blocks == 0


def test_a_busy_holder_is_left(bench: RoutingBench) -> None:
    bench.say(B, stored=chain("q", 8), queued_uncached_tokens=50_000, num_waiting=10)
    placement = bench.routing.choose(query("q"))
    assert placement.replica_id == A
    assert placement.reason is RouteReason.LOAD


def test_evicted_blocks_no_longer_attract(bench: RoutingBench) -> None:
    bench.say(B, stored=chain("q", 8))
    assert bench.say(B, removed=chain("q", 8)) == Digest()
    assert bench.routing.choose(query("q")).reason is RouteReason.COLD


def test_a_snapshot_replaces_what_was_known(bench: RoutingBench) -> None:
    bench.say(B, stored=chain("old", 8))
    fresh = to_hints(chain("new", 8))
    digest = whole(bench.routing.on_snapshot(B, Snapshot(FORMAT_VERSION, 1, 9, tuple(fresh), load())))
    assert digest == digest_of(fresh)
    assert bench.routing.choose(query("new")).replica_id == B
    assert bench.routing.choose(query("old")).reason is RouteReason.COLD


def test_what_a_snapshot_half_applied_says_is_held_by_nobody_yet(bench: RoutingBench) -> None:
    bench.say(B, stored=chain("q", 8))
    long = to_hints(chain("unheard", 1000))  # more than one slice
    steps = bench.routing.on_snapshot(B, Snapshot(FORMAT_VERSION, 1, 9, tuple(long), load()))
    next(steps)
    assert bench.routing.weigh(query("unheard")).available_tokens == 0
    assert bench.routing.weigh(query("q")).available_tokens == 8 * BLOCK_SIZE
    steps.close()


@pytest.mark.parametrize(
    ("reason", "is_kept"),
    [(ResyncReason.GAP, True), (ResyncReason.EPOCH, False), (ResyncReason.DRIFT, False)],
)
def test_a_resync_voids_only_what_is_known_to_be_wrong(
    bench: RoutingBench, reason: ResyncReason, is_kept: bool
) -> None:
    bench.say(B, stored=chain("q", 8))
    bench.routing.on_resync(B, reason)
    assert (bench.routing.choose(query("q")).reason is RouteReason.PREFIX) is is_kept
    assert bench.routing.statistics().resyncs == {reason: 1}


def test_one_request_may_ask_for_another_policy(bench: RoutingBench) -> None:
    bench.say(A, stored=chain("q", 8))
    picks = []
    for index in range(4):
        turn = query("q")._replace(request_id=RequestId(f"turn{index}"), policy="round_robin")
        placement = bench.routing.choose(turn)
        assert placement.policy == "round_robin"
        assert placement.reason is RouteReason.TURN
        picks.append(placement.replica_id)
    assert picks in ([A, B, A, B], [B, A, B, A])
    assert bench.routing.choose(query("q")).policy == "expected_time"


def test_an_unknown_policy_is_refused_and_nothing_is_booked(bench: RoutingBench) -> None:
    with pytest.raises(ConfigError, match="fastest"):
        bench.routing.choose(query("q", policy="fastest"))
    assert bench.routing.statistics().in_flight == 0


def test_statistics_count_decisions_and_index(bench: RoutingBench) -> None:
    bench.say(A, stored=chain("q", 8))
    bench.routing.choose(query("q"))
    bench.routing.choose(query("cold"))
    bench.routing.on_malformed(A)
    seen = bench.routing.statistics()
    assert seen.decisions == {RouteReason.PREFIX: 1, RouteReason.COLD: 1}
    assert seen.index_entries == 16
    assert seen.index_bytes > 0
    assert seen.malformed_events == 1
    assert [r.num_blocks for r in seen.replicas] == [8, 0]


def test_a_record_holds_what_the_decision_was_made_from(bench: RoutingBench) -> None:
    bench.say(A, stored=chain("q", 8))
    bench.routing.choose(query("q"))
    [record] = bench.records
    best, other = record.ranked
    assert (best.replica_id, best.candidate.cached_tokens) == (A, 128)
    assert (other.replica_id, other.candidate.cached_tokens) == (B, 0)
    assert best.cost is not None
    assert other.cost is not None
    assert best.cost < other.cost
    assert record.shape.num_prompt_tokens == 129


def test_load_that_waits_for_a_snapshot_still_counts(bench: RoutingBench) -> None:
    bench.routing.on_load(A, Load(num_running=9))
    assert bench.routing.statistics().replicas[0].num_running == 9
    bench.routing.on_load(replica_id(77), Load())


def test_hot_prefixes_are_spread_without_a_charge_for_the_copy(bench: RoutingBench) -> None:
    system = chain("system", 64)
    bench.say(A, stored=system)
    for index in range(40):
        hashes = chain(f"user{index}", 1, system)
        placement = bench.routing.choose(RouteQuery(RequestId(f"u{index}"), hashes, 65 * BLOCK_SIZE + 1))
        bench.routing.release(placement.request_id)
        bench.clock.advance(0.1)
    first, last = bench.records[0].shape, bench.records[-1].shape
    assert (first.hot_tokens, first.hot_share) == (0, 1.0)
    assert last.hot_tokens == 64 * BLOCK_SIZE
    assert last.hot_share < 1 / 4


def test_a_hot_prefix_gets_a_copy_when_its_holder_is_busy_and_no_more_than_are_used(
    bench: RoutingBench,
) -> None:
    """A burst alone makes nothing hot: its twins stay together."""
    system = chain("system", 64)
    bench.say(A, stored=system)

    def ask(name: str) -> ReplicaId:
        hashes = chain(name, 1, system)
        placement = bench.routing.choose(RouteQuery(RequestId(name), hashes, 65 * BLOCK_SIZE + 1))
        bench.routing.release(placement.request_id)
        return placement.replica_id

    assert {ask(f"twin{index}") for index in range(50)} == {A}
    for index in range(20):
        ask(f"user{index}")
        bench.clock.advance(0.3)
    bench.say(A, queued_uncached_tokens=500, num_waiting=1)
    bench.say(B)
    assert ask("hot") == B
    bench.say(A, queued_uncached_tokens=500, num_waiting=1)
    bench.say(B)
    cold = chain("rare", 64)
    bench.say(A, stored=cold, queued_uncached_tokens=500, num_waiting=1)
    assert bench.routing.choose(RouteQuery(RequestId("rare"), cold, 65 * BLOCK_SIZE + 1)).replica_id == A


def test_hints_are_what_events_carry(bench: RoutingBench) -> None:
    """The router matches low 64 bits only: a full hash that differs above them is the same block to it."""
    [block_hash] = chain("q", 1)
    twin = BlockHash(block_hash[:8] + bytes(8))
    bench.say(A, stored=[block_hash])
    placement = bench.routing.choose(RouteQuery(RequestId("x"), [twin], BLOCK_SIZE + 1))
    assert placement.overlap_blocks == 1
    assert to_hints([twin]) == [HashHint(int.from_bytes(block_hash[:8], "little"))]


def test_a_conversation_stays_on_a_replica_that_tells_no_blocks() -> None:
    """Its cache is imitated: the prompt from when it is sent, the output from when it is known."""
    bench = RoutingBench(0)
    bench.infos = {name: info(has_kv_events=False) for name in (A, B)}
    bench.routing.update_replicas(bench.infos)
    for name in bench.infos:
        assert bench.say(name) == Digest()
    first = bench.routing.choose(query("q", 8))
    bench.routing.routed(first.request_id, first.replica_id)
    bench.routing.first_token(first.request_id, first.replica_id, cached_tokens=0)
    bench.routing.release(first.request_id)
    bench.routing.finish(first.request_id, block_hashes=chain("answer", 4, chain("q", 8)))
    bench.clock.advance(60.0)
    for name in bench.infos:
        bench.say(name)
    turn = chain("next", 3, chain("answer", 4, chain("q", 8)))
    second = bench.routing.choose(RouteQuery(RequestId("second"), turn, 15 * BLOCK_SIZE + 1))
    assert second.replica_id == first.replica_id
    assert second.overlap_blocks == 12
    assert second.reason is RouteReason.PREFIX
