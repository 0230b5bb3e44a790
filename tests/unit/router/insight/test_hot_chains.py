"""Hot chains through a real Routing: shares, hits, holders, decay, and who is forgotten first."""

from __future__ import annotations

import pytest

from cache.block_hash import hint
from cache.events import FORMAT_VERSION, EventBatch, digest_of
from cache.types import BlockHash, RequestId
from router.insight.hot_chains import MAX_PROMPT_RUNS, HotChains, HotRun
from router.placement.routing import Routing
from tests.fakes.router import BLOCK_SIZE, FakeClock, chain, config, info, load, query, replica_id

HALF_LIFE_S = 100.0


class Bench:
    """Three replicas; `ask` routes a prompt and has it answered."""

    def __init__(self, **bounds: int) -> None:
        self.clock = FakeClock()
        self.routing = Routing(config(silent_after_s=3600.0), clock=self.clock)
        self.chains = HotChains(
            BLOCK_SIZE, clock=self.clock, half_life_s=HALF_LIFE_S, secret=b"a secret of the tests", **bounds
        )
        self.routing.watch(self.chains)
        self.replicas = [replica_id(index) for index in range(3)]
        self.routing.update_replicas(dict.fromkeys(self.replicas, info()))
        for name in self.replicas:
            self.routing.on_load(name, load())
        self._number = 0

    def ask(self, *parts: tuple[str, int], cached_blocks: int = 0) -> None:
        """A prompt of these parts, each so many blocks of its own after the ones before."""
        name = self.decide(*parts)
        self.routing.first_token(name, self.replicas[0], cached_blocks * BLOCK_SIZE)
        self.routing.finish(name)

    def decide(self, *parts: tuple[str, int], name: str | None = None) -> RequestId:
        self._number += 1
        hashes = _hashes(*parts)
        asked = query(
            name or f"r{self._number}",
            block_hashes=hashes,
            num_prompt_tokens=len(hashes) * BLOCK_SIZE + 1,
        )
        self.routing.choose(asked)
        return asked.request_id

    def shown(self) -> list[HotRun]:
        return self.chains.hottest(100)


def _hashes(*parts: tuple[str, int]) -> list[BlockHash]:
    hashes, before = chain("", 0), ""
    for name, num_blocks in parts:
        before += name
        hashes = chain(before, num_blocks, hashes)
    return hashes


def test_a_shared_beginning_is_one_run_with_the_rest_below() -> None:
    bench = Bench()
    for tail in ("x", "y", "y"):
        bench.ask(("system", 10), (tail, 4))
    bench.ask(("other", 3))
    shown = bench.shown()
    assert [(run.parent, run.start, run.end, run.share) for run in shown] == [
        (None, 0, 10, 0.75),
        (0, 10, 14, 0.5),
        (None, 0, 3, 0.25),
        (0, 10, 14, 0.25),
    ]
    assert len({run.name for run in shown}) == 4


def test_a_prompt_that_ends_within_a_run_cuts_it() -> None:
    bench = Bench()
    bench.ask(("system", 10), ("more", 2))
    bench.ask(("system", 4))
    assert [(run.start, run.end, run.share) for run in bench.shown()] == [(0, 4, 1.0), (4, 12, 0.5)]


def test_hits_are_the_engines_own_count_by_run() -> None:
    bench = Bench()
    bench.ask(("system", 10), ("x", 4))
    bench.ask(("system", 10), ("x", 4), cached_blocks=14)
    [whole] = bench.shown()
    assert (whole.start, whole.end, whole.hit_ratio) == (0, 14, 0.5)
    bench.ask(("system", 10), ("y", 4), cached_blocks=12)
    system, x, y = bench.shown()
    assert system.hit_ratio == pytest.approx(2 / 3)
    assert x.hit_ratio == 0.5
    assert y.hit_ratio == 0.5
    bench.ask(("system", 10), ("y", 4), cached_blocks=5)
    system, x, y = bench.shown()
    assert system.hit_ratio == pytest.approx(2.5 / 4)
    assert (x.hit_ratio, y.hit_ratio) == (0.5, 0.25)


def test_without_a_first_token_nothing_is_said_of_hits() -> None:
    bench = Bench()
    name = bench.decide(("system", 4))
    assert bench.shown()[0].hit_ratio is None
    assert bench.chains.num_open == 1
    bench.routing.finish(name)
    assert bench.chains.num_open == 0


def test_holders_are_the_replicas_that_held_all_of_it() -> None:
    bench = Bench()
    hints = [hint(block) for block in _hashes(("system", 10))]
    for number, name in enumerate(bench.replicas[:2]):
        stored = tuple(hints[: 10 - 5 * number])
        bench.routing.on_events(name, EventBatch(FORMAT_VERSION, 1, 1, stored, (), digest_of(stored), load()))
    bench.ask(("system", 10))
    assert bench.shown()[0].num_holders == 1  # the other one holds half


def test_another_attempt_is_the_same_use() -> None:
    bench = Bench()
    for _ in range(3):
        bench.decide(("system", 4), name="again")
    bench.ask(("other", 4))
    assert {run.share for run in bench.shown()} == {0.5}


def test_old_uses_count_for_less() -> None:
    bench = Bench()
    for _ in range(4):
        bench.ask(("old", 4))
    bench.clock.advance(2 * HALF_LIFE_S)
    bench.ask(("new", 4))
    assert {run.share for run in bench.shown()} == {0.5}
    bench.ask(("new", 4))
    assert [round(run.share, 3) for run in bench.shown()] == [0.667, 0.333]


def test_days_later_the_numbers_are_still_numbers() -> None:
    bench = Bench()
    for _ in range(5):
        bench.ask(("system", 4), cached_blocks=4)
        bench.clock.advance(200 * HALF_LIFE_S)
    bench.ask(("system", 4), cached_blocks=0)
    [run] = bench.shown()
    assert run.share == 1.0
    assert run.hit_ratio == pytest.approx(0.0, abs=1e-9)


def test_the_rate_is_per_minute_from_the_start_and_after_hours() -> None:
    bench = Bench()
    for _ in range(60):
        bench.clock.advance(2.0)
        bench.ask(("system", 4))
    assert bench.shown()[0].per_minute == pytest.approx(30, rel=0.05)
    for _ in range(1000):
        bench.clock.advance(2.0)
        bench.ask(("system", 4))
    assert bench.shown()[0].per_minute == pytest.approx(30, rel=0.05)


def test_what_comes_back_stays_among_many_that_do_not() -> None:
    bench = Bench(max_runs=8)
    for number in range(40):
        bench.ask(("system", 10), (f"tail {number}", 2))
        bench.ask((f"once {number}", 3))
    assert bench.chains.num_runs <= 8
    system = bench.shown()[0]
    assert (system.start, system.end, system.share) == (0, 10, 0.5)


def test_one_prompt_cannot_make_more_runs_than_allowed() -> None:
    bench = Bench()
    parts = [(f"turn {number}", 1) for number in range(2 * MAX_PROMPT_RUNS)]
    for length in range(1, len(parts) + 1):  # a conversation that grows by a block each turn
        bench.ask(*parts[:length])
    assert max(run.end for run in bench.shown()) <= 2 * MAX_PROMPT_RUNS
    assert bench.chains.num_runs <= MAX_PROMPT_RUNS


def test_a_prompt_shorter_than_a_block_is_not_followed() -> None:
    bench = Bench()
    bench.ask()
    assert bench.shown() == []
    assert bench.chains.num_open == 0


def test_equal_secrets_give_equal_names() -> None:
    first, second = Bench(), Bench()
    for bench in (first, second):
        bench.ask(("system", 4))
    assert first.shown()[0].name == second.shown()[0].name
    assert len(first.shown()[0].name) == 10
