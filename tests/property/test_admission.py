"""Laws of who may wait: bounded by time, refused only at the bound, never where work could start at once.

And what a refused client is told: never earlier than there can be room, later for who is refused later, and
longer for a longer queue.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cache.types import RequestId
from router.errors import AllBusy
from router.placement.admission import LEAST, RETRY_AFTER_RANGE_S, Admission
from router.placement.held import HeldRequests
from router.placement.hold_options import HoldOptions
from router.placement.routing import Routing
from router.pricing.waiting import level_s
from tests.fakes.router import STEP_TIME, FakeClock, config, info, load, query, replica_id

SECONDS = st.floats(0.0, 100.0)
TOKEN_S = STEP_TIME.per_token_s + STEP_TIME.base_s / 512
MAX_WAIT_S = 2.0
ROUNDING_S = 1e-6


@given(st.lists(SECONDS, min_size=1, max_size=8), SECONDS)
def test_the_level_holds_what_is_held(starts: list[float], held_s: float) -> None:
    """Whoever starts earlier has been filled up to it, and what was poured in is all there."""
    level = level_s(starts, held_s)
    assert sum(max(0.0, level - each) for each in starts) == pytest.approx(held_s, abs=1e-6)
    assert level >= min(starts) - 1e-9


@given(st.lists(SECONDS, min_size=1, max_size=8), SECONDS, SECONDS, st.integers(0, 7))
def test_more_work_never_makes_a_shorter_wait(
    starts: list[float], held_s: float, more_s: float, which: int
) -> None:
    before = level_s(starts, held_s)
    assert level_s(starts, held_s + more_s) >= before - 1e-9
    longer = [each + more_s * (index == which % len(starts)) for index, each in enumerate(starts)]
    assert level_s(longer, held_s) >= before - 1e-9


@given(st.lists(SECONDS, min_size=2, max_size=8), SECONDS)
def test_one_replica_more_never_makes_a_longer_wait(starts: list[float], held_s: float) -> None:
    assert level_s(starts, held_s) <= level_s(starts[1:], held_s) + 1e-9


@given(SECONDS, SECONDS, SECONDS, st.floats(0.01, 50.0), st.sampled_from([math.inf, 1.0, 30.0, -1.0]))
def test_refused_exactly_beyond_the_bound_or_a_deadline_out_of_reach(
    wait_s: float, ahead_s: float, own_s: float, max_wait_s: float, deadline_s: float
) -> None:
    clock = FakeClock()
    admission = Admission(max_wait_s, clock)
    ahead_s = min(ahead_s, wait_s)
    is_hopeless = ahead_s > 0 and 0 < deadline_s < ahead_s + own_s - 1e-9

    def ask() -> None:
        deadline = clock() + deadline_s
        admission.check(wait_s=wait_s, ahead_s=ahead_s, own_s=own_s, deadline=deadline, num_replicas=1)

    if wait_s > max_wait_s or is_hopeless:
        with pytest.raises(AllBusy):
            ask()
    elif not 0 < deadline_s < ahead_s + own_s + 1e-9:
        ask()


@given(SECONDS, SECONDS, st.floats(0.0, 5.0))
def test_a_longer_queue_is_a_later_return(wait_s: float, more_s: float, own_s: float) -> None:
    def told(backlog_s: float) -> float:
        return Admission(1.0, FakeClock()).refusal(backlog_s, own_s, 2).retry_after_s

    assert told(wait_s) <= told(wait_s + more_s)
    least, most = RETRY_AFTER_RANGE_S
    assert told(wait_s) == pytest.approx(min(max(wait_s, least), most))


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 20.0), st.floats(0.0, 3.0)), max_size=20))
def test_nobody_is_told_to_return_before_there_can_be_room(calls: list[tuple[float, float, float]]) -> None:
    """And of those refused in one moment the later ones return no earlier."""
    clock = FakeClock()
    admission = Admission(1.0, clock)
    least, most = RETRY_AFTER_RANGE_S
    latest = 0.0
    for gap_s, room_in_s, own_s in calls:
        clock.advance(gap_s)
        told = admission.refusal(room_in_s, own_s, 2).retry_after_s
        assert min(room_in_s, most) - ROUNDING_S <= told <= most
        assert told >= least
        if gap_s == 0.0:
            assert told >= latest - ROUNDING_S
        latest = told


def test_overload_ends_though_nobody_comes() -> None:
    """45 s after the last request the gauge was 1, and the next burst was refused behind the strict bound."""
    clock, max_wait_s = FakeClock(), 10.0
    admission = Admission(max_wait_s, clock)

    def came(num_waiting: int, wait_s: float) -> None:
        admission.came(0.01, num_waiting=num_waiting, wait_s=wait_s, num_replicas=2)

    for _ in range(LEAST):  # what is long is known
        came(0, 0.0)
    for number in range(100):
        clock.advance(0.1)
        came(10 * number, 0.1 * number)
    assert admission.bound_s < max_wait_s
    admission.refusal(1.0, 0.01, 2)
    clock.advance(RETRY_AFTER_RANGE_S[1] + max_wait_s - 0.1)
    assert admission.state(0.0).is_overload
    clock.advance(0.2)
    state = admission.state(0.0)
    assert (state.bound_s, state.is_overload) == (max_wait_s, False)


ARRIVALS = st.lists(
    st.tuples(st.floats(0.0, 0.5), st.integers(1, 200), st.sampled_from([None, 0.5, 3.0])),
    min_size=1,
    max_size=60,
)


@settings(max_examples=60)
@example([(0.0, 1, None), (0.0, 1, None), (0.5, 1, None), (0.5, 1, 0.5)], 3, [0.0, 0.0, 2.0])
@given(ARRIVALS, st.integers(1, 3), st.lists(st.floats(0.0, 4.0), min_size=3, max_size=3))
def test_what_is_taken_in_stays_within_the_bound(
    arrivals: list[tuple[float, int, float | None]], num_replicas: int, backlogs: list[float]
) -> None:
    """Whatever comes: one request beyond the bound at most is here; nobody leaves but placed or late."""
    clock = FakeClock()
    settings_ = config(max_wait_s=MAX_WAIT_S)
    routing = Routing(settings_, clock=clock)
    replicas = [replica_id(index) for index in range(num_replicas)]
    routing.update_replicas({replica: info() for replica in replicas})
    busy_until = {}
    for replica, backlog_s in zip(replicas, backlogs, strict=False):
        busy_until[replica] = clock() + backlog_s
        routing.on_load(replica, load(queued_uncached_tokens=round(backlog_s / TOKEN_S), num_waiting=1))
    held = HeldRequests(routing, replace(HoldOptions.of(settings_), max_held_per_replica=1000), clock)
    taken: set[RequestId] = set()
    for number, (gap_s, num_blocks, timeout_s) in enumerate(arrivals):
        clock.advance(gap_s)
        name, now = RequestId(str(number)), clock()
        held_s = held.engine_s
        deadline = None if timeout_s is None else now + timeout_s
        refused: AllBusy | None = None
        try:
            held.submit(query(name, num_blocks), deadline=deadline)
        except AllBusy as error:
            refused = error
        # Looked at after deciding, which may have found a replica late that seemed idle until then.
        before_s = routing.wait_s(held_s)
        is_idle = any(state.backlog_s(now) == 0.0 for state in routing.free_replicas(0.0)[1])
        if refused is not None:
            # A deadline may be out of reach behind those who wait; nobody is refused where nobody does.
            assert before_s > (MAX_WAIT_S - ROUNDING_S if timeout_s is None else 0.0)
            told_s = refused.retry_after_s
            assert told_s >= min(before_s - MAX_WAIT_S, RETRY_AFTER_RANGE_S[1]) - ROUNDING_S
        else:
            taken.add(name)
            assert before_s <= MAX_WAIT_S or is_idle
        for departure in held.poll():
            taken.discard(departure.request_id)
            if departure.placement is None:
                assert timeout_s is not None or departure.error is not None
        # Nobody who was taken in is sent away for somebody else.
        assert all(name in held for name in taken)
