"""Which replicas a decision may choose: lost, draining, full, silent, of another fingerprint, gone."""

from __future__ import annotations

import logging

import pytest

from cache.types import ReplicaId, RequestId
from router.errors import AllBusy, NoReplica
from router.placement.routing import RouteReason
from tests.fakes.router import OTHER_FINGERPRINT, OTHER_MODEL, chain, info, query, replica_id
from tests.fakes.routing import RoutingBench

A, B, C = replica_id(0), replica_id(1), replica_id(2)


def test_no_replica_at_all() -> None:
    bench = RoutingBench(0)
    with pytest.raises(NoReplica):
        bench.routing.choose(query("q"))
    assert bench.routing.statistics().no_replica == 1


def test_excluded_and_draining_replicas_are_never_chosen() -> None:
    bench = RoutingBench(3)
    bench.say(A, stored=chain("q", 8), is_draining=True)
    bench.say(B, stored=chain("q", 8))
    assert bench.routing.choose(query("q", excluded=frozenset({B}))).ranks == (C,)
    with pytest.raises(NoReplica) as caught:
        bench.routing.choose(query("q", excluded=frozenset({B, C})))
    assert (caught.value.num_known, caught.value.num_excluded) == (3, 2)


def test_all_full_is_busy_and_says_when_to_come_back(bench: RoutingBench) -> None:
    bench.say(A, num_waiting=256, queued_uncached_tokens=100_000)
    bench.say(B, num_waiting=256, queued_uncached_tokens=50_000)
    with pytest.raises(AllBusy) as caught:
        bench.routing.choose(query("q"))
    assert caught.value.num_replicas == 2
    assert caught.value.retry_after_s == pytest.approx(0.01 * 50_000 / 512 + 5.0 + 256 * 0.001)
    assert bench.routing.statistics().in_flight == 0


def test_a_replica_whose_context_is_too_short_is_passed_over() -> None:
    bench = RoutingBench(0)
    bench.routing.update_replicas({A: info(max_model_len=100), B: info(max_model_len=1000)})
    assert bench.routing.choose(query("q", max_tokens=10)).ranks == (B,)
    exact = query("exact")
    assert bench.routing.choose(exact._replace(max_tokens=1000 - exact.num_prompt_tokens)).ranks == (B,)
    assert len(bench.routing.choose(query("r", max_tokens=5000)).ranks) == 2


def test_a_lost_replica_is_ignored_until_the_membership_lets_go_of_it(bench: RoutingBench) -> None:
    bench.say(A, stored=chain("q", 8))
    bench.routing.replica_lost(A)
    assert bench.routing.statistics().index_entries == 0
    bench.routing.update_replicas(bench.infos)  # Serve has not noticed yet
    assert set(bench.routing.replicas) == {B}
    bench.routing.update_replicas({B: bench.infos[B]})
    bench.routing.update_replicas(bench.infos)
    assert set(bench.routing.replicas) == {A, B}
    assert bench.say(replica_id(77)) is None


def test_another_fingerprint_is_routed_by_load_and_never_sees_our_hashes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = RoutingBench(1)
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
    bench, c = RoutingBench(1), replica_id(2)
    with caplog.at_level(logging.WARNING):
        bench.routing.update_replicas({B: info(has_prefix_cache=False), c: info(has_prefix_cache=False)})
    assert not caplog.records
    chosen = [bench.routing.choose(query("twin", request_id=RequestId(str(n)))).replica_id for n in range(4)]
    assert sorted(chosen) == [B, B, c, c]
    assert bench.routing.statistics().index_entries == 0


def test_another_model_gets_nothing_however_busy_ours_are(caplog: pytest.LogCaptureFixture) -> None:
    """It would take our token ids for other words, and answer 200."""
    bench = RoutingBench(1)
    both = {**bench.infos, B: info(fingerprint=OTHER_MODEL)}
    with caplog.at_level(logging.WARNING):
        bench.routing.update_replicas(both)
        bench.routing.update_replicas(both)
    assert [r.message for r in caplog.records] == ["replica has another model, it gets no requests"]
    bench.say(A, num_waiting=5, queued_uncached_tokens=50_000)
    placement = bench.routing.choose(query("q"))
    assert placement.ranks == (A,)
    assert bench.routing.rerank(placement.request_id, [A, B]) == [A]
    assert bench.routing.rerank(RequestId("unheard of"), [B]) == []
    with pytest.raises(NoReplica):
        bench.routing.choose(query("r", excluded=frozenset({A})))
    bench.routing.update_replicas({B: both[B]})
    with pytest.raises(NoReplica):
        bench.routing.choose(query("s"))
    assert set(bench.routing.foreign) == {B}
    bench.routing.update_replicas({})
    assert not bench.routing.foreign


def test_hashes_stay_home_while_any_rank_could_misread_them() -> None:
    bench = RoutingBench(1)
    bench.routing.update_replicas({**bench.infos, B: info(fingerprint=OTHER_FINGERPRINT)})
    bench.say(A, stored=chain("q", 8))
    assert bench.routing.choose(query("q")).block_hashes == ()
    alone = query("r", excluded=frozenset({B}))
    assert bench.routing.choose(alone).block_hashes == alone.block_hashes


def test_a_silent_replica_is_scored_by_load_alone_with_one_warning(
    bench: RoutingBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.say(A, stored=chain("q", 8))
    bench.clock.advance(5.1)
    bench.say(B)
    with caplog.at_level(logging.INFO, logger="router.placement.fleet"):
        for index in range(3):
            placement = bench.routing.choose(query(f"other{index}"))
            bench.routing.release(placement.request_id)
        assert [c.candidate.cached_tokens for c in bench.records[-1].ranked] == [0, 0]
        bench.say(A)
        assert bench.routing.choose(query("q")).replica_id == A
    messages = [record.message for record in caplog.records]
    assert messages == ["replica is silent, routing by load alone", "replica is heard again"]
    assert bench.routing.statistics().degraded == 3


def test_replicas_that_come_and_go_leave_nothing_behind() -> None:
    bench = RoutingBench(1)
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


def test_membership_is_told_to_who_asked(bench: RoutingBench) -> None:
    told: list[set[ReplicaId]] = []
    bench.routing.watch_membership(lambda replicas: told.append(set(replicas)))
    bench.routing.update_replicas({A: bench.infos[A]})
    bench.routing.replica_lost(A)
    assert told == [{A}, set()]
