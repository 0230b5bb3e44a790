"""The last minutes by time: slots, percentiles, sums, and what is forgotten."""

from __future__ import annotations

import random

import pytest

from cache.types import RequestId
from router.insight.accounting import Accounting, UncachedReason
from router.insight.content_sketch import ContentSketch
from router.insight.held_memory import HeldMemory
from router.insight.recent_traffic import ERROR, LEAST_S, MOST_S, RecentTraffic, Tally, bucket_of
from router.placement.routing import Routing
from tests.fakes.router import BLOCK_SIZE, FakeClock, config, info, load, query, replica_id

A = replica_id(0)


class Bench:
    """One replica, requests that are answered when told to."""

    def __init__(self, spans: tuple[tuple[float, int], ...] = ((2.0, 5), (10.0, 3))) -> None:
        self.clock = FakeClock()
        self.routing = Routing(config(), clock=self.clock)
        self.traffic = RecentTraffic(clock=self.clock, spans=spans)
        accounting = Accounting(
            BLOCK_SIZE,
            held=HeldMemory(1 << 8),
            sketch=ContentSketch(BLOCK_SIZE, num_slots=1 << 8, secret=b"sixteen bytes of a test"),
        )
        accounting.listen(self.traffic.accounted)
        self.routing.watch(self.traffic)
        self.routing.watch(accounting)
        self.routing.update_replicas({A: info()})
        self.routing.on_load(A, load())
        self._number = 0

    def answer(self, after_s: float, *, cached_tokens: int = 0, num_blocks: int = 4) -> None:
        name = f"r{self._number}"
        self._number += 1
        self.routing.choose(query(name, num_blocks, asked_at=self.clock.now))
        self.clock.advance(after_s)
        self.routing.first_token(RequestId(name), A, cached_tokens)
        self.routing.finish(RequestId(name))


def test_a_request_is_in_the_slot_of_its_first_token_in_every_span() -> None:
    bench = Bench()
    bench.clock.advance(1.0)
    bench.answer(2.0, cached_tokens=2 * BLOCK_SIZE)
    fine, coarse = bench.traffic.span(0), bench.traffic.span(1)
    assert [point.requests for point in fine.points] == [0, 1]
    assert [point.requests for point in coarse.points] == [1]
    assert (fine.step_s, fine.since_start_s, coarse.since_start_s) == (2.0, 4.0, 10.0)
    assert fine.points[1].p50_s == pytest.approx(2.0, rel=ERROR)
    assert (fine.points[1].prompt, fine.points[1].delivered) == (4 * BLOCK_SIZE + 1, 2 * BLOCK_SIZE)
    assert fine.points[0].p50_s is None


def test_reasons_sum_to_what_was_computed() -> None:
    bench = Bench()
    for cached in (0, 16, 48):
        bench.answer(0.1, cached_tokens=cached)
    total = bench.traffic.span(0).total
    assert total.requests == 3
    assert sum(total.uncached.values()) == total.prompt - total.delivered
    assert UncachedReason.PARTIAL in total.uncached


def test_the_oldest_slots_are_forgotten_and_the_others_kept() -> None:
    bench = Bench()
    bench.answer(0.5)
    bench.clock.advance(8.0)
    bench.answer(0.5)
    assert [point.requests for point in bench.traffic.span(0).points] == [1, 0, 0, 0, 1]
    bench.clock.advance(2.0)
    fine = bench.traffic.span(0)
    assert [point.requests for point in fine.points] == [0, 0, 0, 1, 0]
    assert fine.total.requests == 1
    bench.clock.advance(100.0)
    assert bench.traffic.span(0).total.requests == 0
    assert [point.requests for point in bench.traffic.span(0).points] == [0] * 5


def test_a_slot_that_is_over_is_not_summed_again_but_one_in_progress_is() -> None:
    bench = Bench()
    bench.answer(0.1)
    assert bench.traffic.span(0).points[-1].requests == 1
    bench.answer(0.1)
    assert bench.traffic.span(0).points[-1].requests == 2


def test_a_retry_counts_from_when_the_request_first_wanted_a_replica() -> None:
    bench = Bench()
    asked_at = bench.clock.now
    for _ in range(3):
        bench.routing.choose(query("r", asked_at=asked_at))
        bench.clock.advance(0.5)
    bench.routing.first_token(RequestId("r"), A, 0)
    bench.routing.choose(query("r", asked_at=asked_at))  # its replica died: the stream goes on elsewhere
    bench.routing.first_token(RequestId("r"), A, 0)
    assert bench.traffic.span(0).total.requests == 1
    assert bench.traffic.span(0).points[-1].p50_s == pytest.approx(1.5, rel=ERROR)


def test_requests_without_a_first_token_are_forgotten_when_they_end() -> None:
    bench = Bench()
    bench.routing.choose(query("gone"))
    assert bench.traffic.num_open == 1
    bench.routing.finish(RequestId("gone"))
    assert bench.traffic.num_open == 0
    assert bench.traffic.span(0).total.requests == 0


def test_quantiles_are_right_to_within_the_error_told() -> None:
    rng = random.Random(5)
    seconds = sorted(rng.lognormvariate(-2.0, 1.5) for _ in range(2000))
    tally = Tally()
    for value in seconds:
        tally.buckets[bucket_of(value)] += 1
    for quantile, found in zip((0.5, 0.9, 0.99), tally.quantiles(0.5, 0.9, 0.99), strict=True):
        assert found == pytest.approx(seconds[int(quantile * len(seconds)) - 1], rel=ERROR * 1.01)


@pytest.mark.parametrize(("seconds", "least"), [(-1.0, LEAST_S), (0.0, LEAST_S), (1e9, MOST_S)])
def test_what_is_out_of_range_counts_as_the_end_of_it(seconds: float, least: float) -> None:
    assert bucket_of(seconds) == bucket_of(least)
    assert Tally().quantiles(0.5) == (None,)
