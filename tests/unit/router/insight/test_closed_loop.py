"""Expected against found: what is counted, who is doubted, and how right matches are in steady state."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from cache.types import ReplicaId, RequestId
from replica.config import SimConfig
from router.insight.accounting import Accounting, TokenAccount, UncachedReason
from router.insight.closed_loop import DOUBT_MISSES, MIN_DOUBT_INTERVAL_S, RECENT, ClosedLoop
from router.insight.content_sketch import ContentSketch
from router.insight.held_memory import HeldMemory
from router.placement.decision import DecisionRecord, RouteReason
from router.placement.routing import Routing
from tests.fakes.fleet import BLOCK_SIZE, Fleet
from tests.fakes.router import FakeClock, config, decisions_of, info, load, query, replica_id

A, B = replica_id(0), replica_id(1)
SIZE = 16


@dataclass
class Bench:
    clock: FakeClock = field(default_factory=FakeClock)
    doubted: list[ReplicaId] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loop = ClosedLoop(SIZE, clock=self.clock, doubt=self.doubted.append)
        routing = Routing(config(), clock=self.clock)
        routing.update_replicas({A: info()})
        routing.on_load(A, load())
        records = decisions_of(routing)
        routing.choose(query("some", 64))
        [self.record] = records

    def hears(self, captured: int, delivered: int, *, exact: int | None = None) -> None:
        """An account in blocks; exact: of what was captured, what the replica had announced (all of it)."""
        record = self.record
        told = DecisionRecord(
            record.request_id,
            record.decided_at,
            record.policy,
            record.shape,
            record.ranking,
            record.excluded,
            RouteReason.PREFIX,
            exact_tokens=SIZE * (captured if exact is None else exact),
        )
        self.loop.heard(
            TokenAccount(RequestId("some"), A, 64 * SIZE, 0, captured * SIZE, delivered * SIZE, {}, None),
            told,
        )


def test_errors_fall_into_their_buckets() -> None:
    bench = Bench()
    for captured, delivered in ((4, 4), (4, 3), (4, 5), (4, 2), (10, 0), (0, 64)):
        bench.hears(captured, delivered)
    totals = bench.loop.totals
    assert (totals.requests, totals.error_blocks) == (6, 0 + 1 + 1 + 2 + 10 + 64)
    assert totals.by_bound[:8] == [1, 2, 1, 0, 0, 1, 0, 1]  # 0, 1, 2, 4, 8, 16, 32, 64
    assert bench.loop.share_within_one == pytest.approx(3 / 6)


def test_the_recent_share_forgets_what_is_long_ago() -> None:
    bench = Bench()
    for _ in range(RECENT):
        bench.hears(9, 0, exact=0)
    assert bench.loop.share_within_one == 0.0
    for _ in range(RECENT):
        bench.hears(9, 9)
    assert bench.loop.share_within_one == 1.0


def test_missing_tokens_are_told_by_who_promised_them() -> None:
    bench = Bench()
    bench.hears(10, 2, exact=6)
    assert (bench.loop.totals.missing_exact, bench.loop.totals.missing_predicted) == (4 * SIZE, 4 * SIZE)
    bench.hears(2, 10)
    assert bench.loop.totals.unexpected == 8 * SIZE


def test_a_replica_that_keeps_breaking_its_word_is_doubted_once() -> None:
    bench = Bench()
    for _ in range(DOUBT_MISSES - 1):
        bench.hears(10, 0)
    assert not bench.doubted
    for _ in range(100):
        bench.hears(10, 0)
    assert bench.doubted == [A]


def test_doubt_that_does_not_help_grows_rare() -> None:
    """Nobody can make the fleet send snapshots all day: an hour of misses costs a handful."""
    bench = Bench()
    for _ in range(3600):
        bench.hears(10, 0)
        bench.clock.advance(1.0)
    assert 4 <= len(bench.doubted) <= 8


def test_a_new_trouble_after_a_quiet_hour_is_met_at_once() -> None:
    bench = Bench()
    for _ in range(200):
        bench.hears(10, 0)
        bench.clock.advance(1.0)
    before = len(bench.doubted)
    bench.clock.advance(100 * MIN_DOUBT_INTERVAL_S)
    for _ in range(40):
        bench.hears(10, 0)
    assert len(bench.doubted) == before + 1


def test_wrong_guesses_of_the_router_are_no_reason_for_doubt() -> None:
    bench = Bench()
    for _ in range(1000):
        bench.hears(10, 0, exact=0)
        bench.hears(10, 9)
    assert not bench.doubted


def test_an_unfollowed_replica_is_no_error() -> None:
    bench = Bench()
    bench.record.ranking.unmatched = frozenset({A})
    bench.hears(0, 10)
    assert bench.loop.totals.requests == 0


# --- with engines ---------------------------------------------------------------------------------


def conversations(fleet: Fleet, rng: random.Random, num_sessions: int, duration_s: float) -> None:
    """Sessions on two system prompts, each turn longer than the one before; caches overflow."""
    think_s = duration_s / 30
    heads = [[rng.randrange(1000) for _ in range(48)] for _ in range(2)]
    for session in range(num_sessions):
        at_s, tokens = rng.uniform(0, duration_s), list(rng.choice(heads))
        for turn in range(rng.randint(1, 6)):
            tokens = tokens + [rng.randrange(1000) for _ in range(rng.randint(5, 60))]
            fleet.send(at_s, f"{session}/{turn}", tokens, max_tokens=rng.randint(1, 8))
            at_s += rng.expovariate(1 / think_s)


def watched(fleet: Fleet) -> tuple[Accounting, ClosedLoop, list[ReplicaId]]:
    accounting = Accounting(
        BLOCK_SIZE,
        held=HeldMemory(1 << 14),
        sketch=ContentSketch(BLOCK_SIZE, num_slots=1 << 14, secret=b"sixteen bytes of a test"),
    )
    doubted: list[ReplicaId] = []
    loop = ClosedLoop(BLOCK_SIZE, clock=lambda: fleet.now, doubt=doubted.append)
    accounting.listen(loop.heard)
    fleet.routing.watch(accounting)
    return accounting, loop, doubted


@pytest.mark.parametrize(
    ("duration_s", "event_delay_s"),
    [
        pytest.param(60.0, 0.0, marks=(pytest.mark.long, pytest.mark.broad)),
        (60.0, 0.02),
        (4.0, 0.02),
    ],
)
def test_in_steady_state_matches_are_right_to_within_a_block(duration_s: float, event_delay_s: float) -> None:
    """At least 95 % of requests, on four engines whose caches overflow."""
    fleet = Fleet(4, num_blocks=256, event_delay_s=event_delay_s, sim=SimConfig())
    accounting, loop, doubted = watched(fleet)
    conversations(fleet, random.Random(5), num_sessions=400, duration_s=duration_s)
    fleet.run()
    assert fleet.num_answered == accounting.totals.requests == loop.totals.requests > 1000
    assert accounting.totals.uncached[UncachedReason.EVICTED] > 0, "the caches never overflowed"
    assert accounting.totals.delivered > accounting.totals.prompt // 4
    assert sum(loop.totals.by_bound[:2]) / loop.totals.requests >= 0.95
    assert loop.share_within_one >= 0.95
    assert not doubted
    assert fleet.routing.statistics().in_flight == 0


def test_an_engine_that_lost_its_cache_without_a_word_is_found_and_repaired() -> None:
    """Its events say nothing (the digest agrees with them), its answers do."""
    fleet = Fleet(1, num_blocks=4096)
    accounting = Accounting(BLOCK_SIZE, held=HeldMemory(1 << 12), sketch=ContentSketch(BLOCK_SIZE))
    loop = ClosedLoop(BLOCK_SIZE, clock=lambda: fleet.now, doubt=fleet.snapshot)
    accounting.listen(loop.heard)
    fleet.routing.watch(accounting)
    [replica] = fleet.replicas.values()
    rng = random.Random(3)
    prompts = [[rng.randrange(1000) for _ in range(80)] for _ in range(60)]
    for number, prompt in enumerate(prompts):
        fleet.send(0.1 * number, f"warm {number}", prompt)

    def lose() -> None:
        log = replica.log
        log._published.clear()  # what a snapshot would say
        log._num_hashes.clear()
        replica.core._cache.pool._sink = None  # no word of it
        replica.core._cache.clear()
        replica.core._cache.pool._sink = log

    fleet.at(10.0, lose)
    for number, prompt in enumerate(prompts):
        fleet.send(20.0 + number, f"again {number}", prompt)
    fleet.run()
    assert loop.totals.doubts == 1
    stale = accounting.totals.uncached[UncachedReason.STALE]
    assert 0 < stale <= 80 * (DOUBT_MISSES + 1), "each prompt after the snapshot is known to be gone"
