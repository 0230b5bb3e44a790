"""Requests that wait at the router: whose turn it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cache.types import RequestId
from router.placement.decision import Decision, RouteQuery
from router.placement.held import LOOK_BEHIND_S, LOOKS_BEHIND
from router.placement.hold_options import HoldOptions
from tests.fakes.held import OPTIONS, A, B, HoldingRouter
from tests.fakes.router import BLOCK_SIZE, config, decisions_of, query


@pytest.fixture
def router() -> HoldingRouter:
    return HoldingRouter()


def test_the_shorter_of_two_may_leave_earlier(router: HoldingRouter) -> None:
    """Worked by hand: 0.2 s and 0.6 s of prefill, mean 0.4 s. The short one is sent behind
    0.2 * exp(-0.2 / 0.4) = 0.12 s, the long one behind 0.2 * exp(-0.6 / 0.4) = 0.045 s: another router that
    held the long one alone would have heard of the short one by then.
    """
    router = HoldingRouter(options=replace(OPTIONS, aging=0.0))
    router.report(A, backlog_s=1.0)
    router.submit("short", 104)
    router.submit("long", 309)
    for name, backlog_s in (("short", 0.121), ("long", 0.0447)):
        router.report(A, backlog_s=backlog_s + 0.004)
        assert router.poll() == []
        router.report(A, backlog_s=backlog_s - 0.004)
        assert router.poll() == [name]
        router.routing.release(RequestId(name))


def test_who_has_grown_old_may_leave_first_of_all(router: HoldingRouter) -> None:
    """However long its prompt: else those that come later would pass it for ever."""
    router.report(A, backlog_s=100.0)
    router.submit("long", 300)
    router.clock.advance(20.0)
    router.submit("young", 200)
    router.report(A, backlog_s=0.19)
    assert router.poll() == ["long"]


def test_short_work_goes_first(router: HoldingRouter) -> None:
    router.report(A, backlog_s=1.0)
    for name, num_blocks in (("long", 300), ("short", 1), ("middle", 60)):
        router.submit(name, num_blocks)
    router.report(A)
    assert router.poll() == ["short", "middle"]  # which takes it over the limit: 60 blocks are 0.12 s
    router.report(A, admitted=(RequestId("short"), RequestId("middle")))
    assert router.poll() == ["long"]


def test_waiting_outweighs_work_in_time(router: HoldingRouter) -> None:
    """300 blocks take 0.58 s: after six seconds they are no longer behind a newcomer that takes none."""
    router.report(A, backlog_s=100.0)
    router.submit("long", 300)
    router.clock.advance(6.0)
    router.submit("short", 1)
    router.report(A)
    assert router.poll() == ["long"]


def test_nobody_old_stands_behind_somebody_young() -> None:
    router = HoldingRouter(options=replace(OPTIONS, aging=0.0))
    router.report(A, backlog_s=100.0)
    router.submit("oldest, longest", 1000)
    router.clock.advance(1.0)
    router.submit("old", 300)
    router.clock.advance(20.0)
    router.submit("young", 1)
    for expected in (["oldest, longest"], ["old"], ["young"]):
        router.report(A)
        assert router.poll() == expected
        for name in expected:
            router.routing.release(RequestId(name))


ONLY_A, ONLY_B = frozenset({B}), frozenset({A})


@pytest.fixture
def small() -> HoldingRouter:
    """Two that wait for A, which is busy, are a whole window."""
    router = HoldingRouter(2, options=replace(OPTIONS, window=2))
    router.report(A, backlog_s=5.0)
    for name in ("1", "2"):
        router.held.submit(query(name, 1, excluded=ONLY_A))
    return router


def weighed_by(router: HoldingRouter, patch: pytest.MonkeyPatch) -> list[str]:
    """Names of those that it weighs from now on."""
    weighed: list[str] = []
    weigh = router.routing.weigh

    def noted(asked: RouteQuery, **kwargs: Any) -> Decision:
        weighed.append(asked.request_id)
        return weigh(asked, **kwargs)

    patch.setattr(router.routing, "weigh", noted)
    return weighed


def test_nobody_waits_behind_a_window_for_a_replica_that_is_free(small: HoldingRouter) -> None:
    """Two dozen that share a hot prefix waited for its one holder, and all others with them."""
    small.submit("3", 2)
    small.held.submit(query("4", 3, excluded=ONLY_A))
    assert small.poll() == ["3"]
    small.held.withdraw(RequestId("1"))
    assert small.poll() == []


def test_behind_a_window_the_first_that_wants_a_replica_is_asked(
    small: HoldingRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.poll()
    small.report(B, backlog_s=0.1)  # short for most, too long for the longest
    small.held.submit(query("first", 300, excluded=ONLY_B))
    small.held.submit(query("second", 300, excluded=ONLY_B))
    weighed = weighed_by(small, monkeypatch)
    small.clock.advance(1e-3)
    small.report(A, backlog_s=5.0)
    small.report(B, backlog_s=0.1)
    assert small.poll() == []
    assert "second" not in weighed
    small.report(B)
    assert small.poll() == ["first"]
    assert small.poll() == []


def test_what_is_wanted_behind_a_window_is_looked_at_anew(small: HoldingRouter) -> None:
    """It was weighed when it came, and wanted the one that was busy for least long."""
    small.report(B)
    assert small.poll() == []  # nobody is behind it yet, and this is when that was looked at
    small.report(B, backlog_s=8.0)
    small.submit("3", 2)
    small.report(B)
    assert small.poll() == []  # not of all that wait each time that somebody says something
    small.clock.advance(LOOK_BEHIND_S)
    small.report(B)
    assert small.poll() == ["3"]


def test_of_many_behind_a_window_a_few_are_weighed_at_a_time(
    small: HoldingRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.report(B, backlog_s=8.0)
    for number in range(3, 13):
        small.held.submit(query(str(number), 2, excluded=ONLY_A))
    weighed = weighed_by(small, monkeypatch)
    small.report(B)
    seen: set[str] = set()
    for _ in range(3):
        small.clock.advance(0.2)
        small.report(A, backlog_s=5.0)
        small.report(B)
        weighed.clear()
        assert small.poll() == []
        assert weighed[:2] == ["1", "2"]
        assert len(weighed) <= 2 + LOOKS_BEHIND
        seen.update(weighed)
    assert len(seen) == 12, "in turns"


def test_a_match_that_arrives_while_waiting_counts() -> None:
    """Its own prefill is what is left of it now, and its place in the order follows."""
    router = HoldingRouter()
    records = decisions_of(router.routing)
    router.report(A, backlog_s=1.0)
    router.submit("short", 1)
    router.submit("shorter by then", 120)
    router.submit("long", 110)
    placement = router.routing.choose(query("shorter by then", 120, request_id=RequestId("elsewhere")))
    router.routing.first_token(placement.request_id, A, 0)
    router.clock.advance(0.1)  # what is cached by now is asked again only so often
    router.report(A, admitted=(placement.request_id,))
    assert router.poll() == ["short", "long"]
    router.submit("long again", 109)
    router.report(A, admitted=(RequestId("short"), RequestId("long")))
    assert router.poll() == ["shorter by then", "long again"]
    record = next(record for record in records if record.request_id == "shorter by then")
    assert record.cached_tokens == 120 * BLOCK_SIZE


def test_in_overload_long_work_is_old_after_half_of_the_longest_wait() -> None:
    made = HoldOptions.of(config(max_wait_s=4.0))
    assert (made.age_floor_s, made.max_wait_s) == (2.0, 4.0)
    unbounded = HoldOptions.of(config(max_wait_s=None))
    assert (unbounded.age_floor_s, unbounded.max_wait_s) == (120.0, float("inf"))
