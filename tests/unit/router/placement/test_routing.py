"""The decision with its bookkeeping: match, cost, pick, reserve, and what events change."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cache.block_hash import hints as to_hints
from cache.errors import ConfigError
from cache.events import FORMAT_VERSION, Digest, EventBatch, Load, Snapshot, digest_of
from cache.types import BlockHash, HashHint, ReplicaId, RequestId
from router.errors import AllBusy, NoReplica
from router.events.event_stream import ResyncReason
from router.placement.routing import (
    RouteQuery,
    RouteReason,
    Routing,
)
from tests.fakes.router import (
    BLOCK_SIZE,
    OTHER_FINGERPRINT,
    FakeClock,
    chain,
    config,
    info,
    load,
    query,
    replica_id,
)

A, B, C = replica_id(0), replica_id(1), replica_id(2)


class Bench:
    """A Routing over replicas on paper."""

    def __init__(self, num_replicas: int = 2, **settings: object) -> None:
        self.clock = FakeClock()
        self.routing = Routing(config(**settings), clock=self.clock)
        self.infos = {replica_id(i): info() for i in range(num_replicas)}
        self.routing.update_replicas(self.infos)
        self.seq = 0
        for replica in self.infos:
            self.say(replica)

    def say(
        self,
        replica: ReplicaId,
        stored: Sequence[BlockHash] = (),
        removed: Sequence[BlockHash] = (),
        **changes: object,
    ) -> Digest | None:
        self.seq += 1
        batch = EventBatch(
            FORMAT_VERSION,
            1,
            self.seq,
            tuple(to_hints(stored)),
            tuple(to_hints(removed)),
            Digest(),
            load(**changes),
        )
        return self.routing.on_events(replica, batch)

    def in_flight(self, replica: ReplicaId) -> int:
        return next(r.in_flight for r in self.routing.statistics().replicas if r.replica_id == replica)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_prompt_goes_where_its_prefix_is(bench: Bench) -> None:
    bench.say(B, stored=chain("q", 8))
    placement = bench.routing.choose(query("q"))
    assert placement.ranks == (B, A)
    assert placement.replica_id == B
    assert placement.overlap_blocks == 8
    assert placement.reason is RouteReason.PREFIX
    assert list(placement.block_hashes) == list(chain("q", 8))


def test_one_prompt_ten_times_stays_on_one_replica_before_any_event(bench: Bench) -> None:
    """Predictions hold twins together until the engine has spoken, requests in flight or not."""
    first = bench.routing.choose(query("q", 64))
    assert first.reason is RouteReason.COLD
    for index in range(9):
        twin = bench.routing.choose(replace(query("q", 64), request_id=RequestId(f"twin{index}")))
        assert twin.replica_id == first.replica_id
        assert twin.reason is RouteReason.PREFIX


def test_an_unconfirmed_prediction_is_forgotten(bench: Bench) -> None:
    placement = bench.routing.choose(query("q"))
    assert bench.routing.statistics().index_entries == 8
    bench.routing.release(placement.request_id)
    bench.clock.advance(5.0)
    assert bench.routing.choose(query("r")).reason is RouteReason.COLD
    assert bench.routing.statistics().index_entries == 8  # of the new prompt


def test_at_least_one_token_is_computed(bench: Bench) -> None:
    """A prompt of exactly 8 blocks hits at most 7."""
    bench.say(A, stored=chain("q", 8))
    placement = bench.routing.choose(query("q", num_prompt_tokens=8 * BLOCK_SIZE))
    assert placement.overlap_blocks == 7
    [record] = bench.routing.records()
    assert record.ranked[0].candidate.cached_tokens == 7 * BLOCK_SIZE


def test_a_prompt_shorter_than_a_block_is_routed_by_load(bench: Bench) -> None:
    placement = bench.routing.choose(RouteQuery(RequestId("x"), (), 3))
    assert placement.reason is RouteReason.COLD
    assert placement.overlap_blocks == 0


def test_a_busy_holder_is_left(bench: Bench) -> None:
    bench.say(B, stored=chain("q", 8), queued_uncached_tokens=50_000, num_waiting=10)
    placement = bench.routing.choose(query("q"))
    assert placement.replica_id == A
    assert placement.reason is RouteReason.LOAD


def test_evicted_blocks_no_longer_attract(bench: Bench) -> None:
    bench.say(B, stored=chain("q", 8))
    assert bench.say(B, removed=chain("q", 8)) == Digest()
    assert bench.routing.choose(query("q")).reason is RouteReason.COLD


def test_a_snapshot_replaces_what_was_known(bench: Bench) -> None:
    bench.say(B, stored=chain("old", 8))
    fresh = to_hints(chain("new", 8))
    digest = bench.routing.on_events(B, Snapshot(FORMAT_VERSION, 1, 9, tuple(fresh), load()))
    assert digest == digest_of(fresh)
    assert bench.routing.choose(query("new")).replica_id == B
    assert bench.routing.choose(query("old")).reason is RouteReason.COLD


def test_what_a_snapshot_half_applied_says_is_held_by_nobody_yet(bench: Bench) -> None:
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
    bench: Bench, reason: ResyncReason, is_kept: bool
) -> None:
    bench.say(B, stored=chain("q", 8))
    bench.routing.on_resync(B, reason)
    assert (bench.routing.choose(query("q")).reason is RouteReason.PREFIX) is is_kept
    assert bench.routing.statistics().resyncs == {reason: 1}


# --- who may be chosen ----------------------------------------------------------------------------


def test_no_replica_at_all() -> None:
    bench = Bench(0)
    with pytest.raises(NoReplica):
        bench.routing.choose(query("q"))
    assert bench.routing.statistics().no_replica == 1


def test_excluded_and_draining_replicas_are_never_chosen() -> None:
    bench = Bench(3)
    bench.say(A, stored=chain("q", 8), is_draining=True)
    bench.say(B, stored=chain("q", 8))
    assert bench.routing.choose(query("q", excluded=frozenset({B}))).ranks == (C,)
    with pytest.raises(NoReplica) as caught:
        bench.routing.choose(query("q", excluded=frozenset({B, C})))
    assert (caught.value.num_known, caught.value.num_excluded) == (3, 2)


def test_all_full_is_busy_and_says_when_to_come_back(bench: Bench) -> None:
    bench.say(A, num_waiting=256, queued_uncached_tokens=100_000)
    bench.say(B, num_waiting=256, queued_uncached_tokens=50_000)
    with pytest.raises(AllBusy) as caught:
        bench.routing.choose(query("q"))
    assert caught.value.num_replicas == 2
    assert caught.value.retry_after_s == pytest.approx(0.01 * 50_000 / 512 + 5.0 + 256 * 0.001)
    assert bench.routing.statistics().in_flight == 0


def test_a_replica_whose_context_is_too_short_is_passed_over() -> None:
    bench = Bench(0)
    bench.routing.update_replicas({A: info(max_model_len=100), B: info(max_model_len=1000)})
    assert bench.routing.choose(query("q", max_tokens=10)).ranks == (B,)
    assert len(bench.routing.choose(query("r", max_tokens=5000)).ranks) == 2


def test_a_lost_replica_is_ignored_until_the_membership_lets_go_of_it(bench: Bench) -> None:
    bench.say(A, stored=chain("q", 8))
    bench.routing.replica_lost(A)
    assert bench.routing.statistics().index_entries == 0
    bench.routing.update_replicas(bench.infos)  # Serve has not noticed yet
    assert set(bench.routing.replicas) == {B}
    bench.routing.update_replicas({B: bench.infos[B]})
    bench.routing.update_replicas(bench.infos)
    assert set(bench.routing.replicas) == {A, B}
    assert bench.say(replica_id(77)) is None


# --- fingerprints, silence ------------------------------------------------------------------------


def test_another_fingerprint_is_routed_by_load_and_never_sees_our_hashes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(1)
    with caplog.at_level(logging.WARNING):
        bench.routing.update_replicas({**bench.infos, B: info(fingerprint=OTHER_FINGERPRINT)})
        bench.routing.update_replicas({**bench.infos, B: info(fingerprint=OTHER_FINGERPRINT)})
    assert [record.message for record in caplog.records] == ["fingerprint differs, routing by load alone"]
    assert bench.say(B, stored=chain("q", 8)) is None  # not indexed
    bench.say(A, num_waiting=5, queued_uncached_tokens=50_000)
    placement = bench.routing.choose(query("q"))
    assert placement.replica_id == B
    assert placement.reason is RouteReason.BLIND
    assert placement.overlap_blocks == 0
    assert placement.block_hashes == ()
    assert bench.routing.statistics().index_entries == 0
    assert bench.routing.statistics().degraded == 1


def test_a_replica_that_keeps_no_prefixes_attracts_no_twins(caplog: pytest.LogCaptureFixture) -> None:
    """With prefix caching off, predictions would send twins to one replica for nothing."""
    bench, c = Bench(1), replica_id(2)
    with caplog.at_level(logging.WARNING):
        bench.routing.update_replicas({B: info(has_prefix_cache=False), c: info(has_prefix_cache=False)})
    assert not caplog.records
    chosen = [bench.routing.choose(query("twin", request_id=RequestId(str(n)))).replica_id for n in range(4)]
    assert sorted(chosen) == [B, B, c, c]
    assert bench.routing.statistics().index_entries == 0


def test_hashes_stay_home_while_any_rank_could_misread_them() -> None:
    bench = Bench(1)
    bench.routing.update_replicas({**bench.infos, B: info(fingerprint=OTHER_FINGERPRINT)})
    bench.say(A, stored=chain("q", 8))
    assert bench.routing.choose(query("q")).block_hashes == ()
    alone = query("r", excluded=frozenset({B}))
    assert bench.routing.choose(alone).block_hashes == alone.block_hashes


def test_a_silent_replica_is_scored_by_load_alone_with_one_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.say(A, stored=chain("q", 8))
    bench.clock.advance(5.1)
    bench.say(B)
    with caplog.at_level(logging.INFO, logger="router.placement.fleet"):
        for index in range(3):
            placement = bench.routing.choose(query(f"other{index}"))
            bench.routing.release(placement.request_id)
        assert [c.candidate.cached_tokens for c in bench.routing.records()[-1].ranked] == [0, 0]
        bench.say(A)
        assert bench.routing.choose(query("q")).replica_id == A
    messages = [record.message for record in caplog.records]
    assert messages == ["replica is silent, routing by load alone", "replica is heard again"]
    assert bench.routing.statistics().degraded == 3


# --- policies -------------------------------------------------------------------------------------


def test_one_request_may_ask_for_another_policy(bench: Bench) -> None:
    bench.say(A, stored=chain("q", 8))
    picks = []
    for index in range(4):
        turn = replace(query("q"), request_id=RequestId(f"turn{index}"), policy="round_robin")
        placement = bench.routing.choose(turn)
        assert placement.policy == "round_robin"
        assert placement.reason is RouteReason.TURN
        picks.append(placement.replica_id)
    assert picks in ([A, B, A, B], [B, A, B, A])
    assert bench.routing.choose(query("q")).policy == "expected_time"


def test_an_unknown_policy_is_refused_and_nothing_is_booked(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="fastest"):
        bench.routing.choose(query("q", policy="fastest"))
    assert bench.routing.statistics().in_flight == 0


# --- reservations ---------------------------------------------------------------------------------


def test_in_flight_returns_to_zero(bench: Bench) -> None:
    placement = bench.routing.choose(query("q"))
    assert bench.in_flight(placement.replica_id) == 1
    bench.routing.release(placement.request_id)
    bench.routing.release(placement.request_id)
    assert bench.routing.statistics().in_flight == 0
    assert bench.in_flight(placement.replica_id) == 0


def test_the_booking_follows_who_accepted(bench: Bench) -> None:
    placement = bench.routing.choose(query("q"))
    first, second = placement.ranks
    bench.routing.routed(placement.request_id, first)
    assert (bench.in_flight(first), bench.in_flight(second)) == (1, 0)
    bench.routing.routed(placement.request_id, second)
    assert (bench.in_flight(first), bench.in_flight(second)) == (0, 1)
    # Its prefix is there now: the next twin follows it.
    bench.routing.first_token(placement.request_id, second, 0)
    bench.routing.release(placement.request_id)
    twin = bench.routing.choose(replace(query("q"), request_id=RequestId("twin")))
    assert (twin.replica_id, twin.overlap_blocks) == (second, 8)
    bench.routing.routed(RequestId("never chosen"), A)
    assert bench.routing.statistics().in_flight == 1


def test_a_retry_replaces_the_first_booking(bench: Bench) -> None:
    first = bench.routing.choose(query("q"))
    again = bench.routing.choose(query("q", excluded=frozenset({first.replica_id})))
    assert again.replica_id != first.replica_id
    assert bench.in_flight(first.replica_id) == 0
    assert bench.routing.statistics().in_flight == 1


def test_a_request_survives_the_loss_of_its_replica(bench: Bench) -> None:
    placement = bench.routing.choose(query("q"))
    bench.routing.replica_lost(placement.replica_id)
    [other] = bench.routing.rerank(placement.request_id, [placement.ranks[1]])
    bench.routing.routed(placement.request_id, other)
    assert bench.in_flight(other) == 1
    bench.routing.release(placement.request_id)
    assert bench.in_flight(other) == 0


def test_rerank_orders_what_is_left_without_booking_again() -> None:
    bench = Bench(3)
    bench.say(C, stored=chain("q", 8))
    bench.routing.choose(query("q", excluded=frozenset({B})))
    assert bench.routing.rerank(RequestId("q"), [A, B, C]) == [C, A]
    bench.say(C, num_waiting=256)
    stranger = replica_id(50)
    assert bench.routing.rerank(RequestId("q"), [stranger, C, A]) == [A, C, stranger]
    assert bench.routing.statistics().in_flight == 1


def test_rerank_orders_calls_that_were_never_chosen_for() -> None:
    """Serve also routes calls that are no generations, such as the one made at start."""
    bench = Bench(2)
    assert sorted(bench.routing.rerank(RequestId("describe"), [A, B])) == [A, B]
    assert bench.routing.rerank(RequestId("describe"), []) == []
    assert bench.routing.statistics().in_flight == 0


# --- what can be seen -----------------------------------------------------------------------------


def test_statistics_count_decisions_and_index(bench: Bench) -> None:
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


def test_reservations_nobody_released_are_counted(bench: Bench) -> None:
    bench.routing.choose(query("q"))
    bench.clock.advance(601.0)
    bench.routing.choose(query("r"))
    assert bench.routing.statistics().expired_reservations == 1


def test_a_record_holds_what_the_decision_was_made_from(bench: Bench) -> None:
    bench.say(A, stored=chain("q", 8))
    bench.routing.choose(query("q"))
    [record] = bench.routing.records()
    best, other = record.ranked
    assert (best.replica_id, best.candidate.cached_tokens) == (A, 128)
    assert (other.replica_id, other.candidate.cached_tokens) == (B, 0)
    assert best.cost is not None
    assert other.cost is not None
    assert best.cost < other.cost
    assert record.shape.num_prompt_tokens == 129


def test_the_engine_naming_a_request_ends_its_reservation(bench: Bench) -> None:
    placement = bench.routing.choose(query("q"))
    bench.say(placement.replica_id, admitted=(placement.request_id,), num_running=1)
    replica = next(r for r in bench.routing.statistics().replicas if r.replica_id == placement.replica_id)
    assert (replica.unseen, replica.in_flight, replica.num_running) == (0, 1, 1)


def test_load_that_waits_for_a_snapshot_still_counts(bench: Bench) -> None:
    bench.routing.on_load(A, Load(num_running=9))
    assert bench.routing.statistics().replicas[0].num_running == 9
    bench.routing.on_load(replica_id(77), Load())


def test_replicas_that_come_and_go_leave_nothing_behind() -> None:
    bench = Bench(1)
    for index in range(1000):
        newcomer = replica_id(index + 10)
        bench.routing.update_replicas({newcomer: info()})
        bench.say(newcomer, stored=chain(f"held{index}", 2))
        placement = bench.routing.choose(query(f"q{index}", 4))
        assert placement.ranks == (newcomer,)
        bench.routing.release(placement.request_id)
    bench.routing.update_replicas({})
    seen = bench.routing.statistics()
    assert (seen.index_entries, seen.in_flight, seen.replicas) == (0, 0, ())


def test_hot_prefixes_are_spread_without_a_charge_for_the_copy(bench: Bench) -> None:
    system = chain("system", 64)
    bench.say(A, stored=system)
    for index in range(40):
        hashes = chain(f"user{index}", 1, system)
        placement = bench.routing.choose(RouteQuery(RequestId(f"u{index}"), hashes, 65 * BLOCK_SIZE + 1))
        bench.routing.release(placement.request_id)
        bench.clock.advance(0.1)
    first, last = bench.routing.records()[0].shape, bench.routing.records()[-1].shape
    assert (first.hot_tokens, first.hot_share) == (0, 1.0)
    assert last.hot_tokens == 64 * BLOCK_SIZE
    assert last.hot_share < 1 / 4


def test_a_hot_prefix_gets_a_copy_when_its_holder_is_busy_and_no_more_than_are_used(bench: Bench) -> None:
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


def test_hints_are_what_events_carry(bench: Bench) -> None:
    """The router matches low 64 bits only: a full hash that differs above them is the same block to it."""
    [block_hash] = chain("q", 1)
    twin = BlockHash(block_hash[:8] + bytes(8))
    bench.say(A, stored=[block_hash])
    placement = bench.routing.choose(RouteQuery(RequestId("x"), [twin], BLOCK_SIZE + 1))
    assert placement.overlap_blocks == 1
    assert to_hints([twin]) == [HashHint(int.from_bytes(block_hash[:8], "little"))]


def test_membership_is_told_to_who_asked(bench: Bench) -> None:
    told: list[set[ReplicaId]] = []
    bench.routing.watch_membership(lambda replicas: told.append(set(replicas)))
    bench.routing.update_replicas({A: bench.infos[A]})
    bench.routing.replica_lost(A)
    assert told == [{A}, set()]


def test_who_accepted_is_known_even_after_it_died(bench: Bench) -> None:
    placement = bench.routing.choose(query("q"))
    assert bench.routing.accepted_by(placement.request_id) is None
    bench.routing.routed(placement.request_id, placement.ranks[1])
    bench.routing.replica_lost(placement.ranks[1])
    assert bench.routing.accepted_by(placement.request_id) == placement.ranks[1]
    bench.routing.release(placement.request_id)
    assert bench.routing.accepted_by(placement.request_id) is None


def test_two_routers_agree_through_the_engine_alone() -> None:
    """Each adds only what the engine has not seen: after its word both know the same load."""
    one, two = Bench(1), Bench(1)
    ours, theirs = one.routing.choose(query("ours")), two.routing.choose(query("theirs"))
    for bench in (one, two):
        bench.say(A, admitted=(ours.request_id, theirs.request_id), num_running=2)
    views = [bench.routing.statistics().replicas[0] for bench in (one, two)]
    assert [(view.unseen, view.num_running, view.backlog_s) for view in views] == [(0, 2, 0.0)] * 2


# --- replicas that tell no blocks -----------------------------------------------------------------


def test_a_conversation_stays_on_a_replica_that_tells_no_blocks() -> None:
    """Its cache is imitated: the prompt from when it is sent, the output from when it is known."""
    bench = Bench(0)
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
