"""Whatever happens to a fleet's load: what is kept between decisions is what would be made anew."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.events import StepTimeModel
from cache.types import RequestId
from router.pricing.fleet_load import FleetLoad
from router.pricing.fleet_queue import queue_of
from router.pricing.replica_load import Reservation
from router.pricing.replica_state import ReplicaState
from tests.fakes.router import STEP_TIME, FakeClock, info, load, replica_id

NAMES = st.sampled_from([replica_id(index) for index in range(4)])
REQUESTS = st.sampled_from([RequestId(f"request-{index}") for index in range(5)])
STEP_TIMES = st.sampled_from([None, STEP_TIME, StepTimeModel(0.02, 2e-4, 1e-9, 1e-3)])
CHANGES = st.one_of(
    st.tuples(st.just("join"), NAMES, st.sampled_from(["", "m", "n"])),
    st.tuples(st.just("leave"), NAMES),
    st.tuples(st.just("report"), NAMES, st.lists(REQUESTS, max_size=2), st.integers(0, 90), STEP_TIMES),
    st.tuples(st.just("reserve"), NAMES, REQUESTS, st.integers(0, 3000)),
    st.tuples(st.just("move"), NAMES, REQUESTS, st.integers(0, 3000)),
    st.tuples(st.just("release"), REQUESTS),
    st.tuples(st.just("expire"), st.floats(0.1, 40.0)),
    st.tuples(st.just("ask")),
)


def _apply(fleet: FleetLoad, clock: FakeClock, change: tuple[object, ...]) -> None:
    match change:
        case ("join", name, machine) if name not in fleet:
            fleet.add_replica(name, info(machine=machine, machine_engines=1.5))
        case ("leave", name):
            fleet.remove_replica(name)
        case ("report", name, admitted, num_running, step_time) if name in fleet:
            account = load(admitted=tuple(admitted), num_running=num_running, step_time=step_time)
            fleet.report(name, account)
        case ("reserve", name, request_id, uncached) if name in fleet:
            fleet.reserve(name, Reservation(request_id, uncached, 0, uncached // 16, clock()))
        case ("move", name, request_id, uncached):
            fleet.move(name, Reservation(request_id, uncached, 0, uncached // 16, clock()))
        case ("release", request_id):
            fleet.release(request_id)
        case ("expire", seconds):
            clock.advance(seconds)
            fleet.expire()
        case ("ask",):
            fleet.states()


@given(changes=st.lists(CHANGES, max_size=40))
def test_states_are_those_made_anew_in_order_of_joining(changes: list[tuple[object, ...]]) -> None:
    clock = FakeClock()
    fleet = FleetLoad(clock, reservation_ttl_s=30.0, silent_after_s=5.0)
    fleet.residence.observe(1.0)
    joined: list[str] = []
    for change in changes:
        if change[0] == "join" and change[1] not in joined:
            joined.append(str(change[1]))
        if change[0] == "leave" and change[1] in joined:
            joined.remove(str(change[1]))
        _apply(fleet, clock, change)
    kept = fleet.states()
    assert [state.replica_id for state in kept] == joined
    anew: list[ReplicaState] = [fleet[state.replica_id]._remake() for state in kept]
    assert kept == anew
    assert list(fleet.places()) == joined
    assert list(fleet.places().values()) == list(range(len(joined)))
    assert fleet.queue() == pytest.approx(queue_of(kept))
    kept.clear()
    assert fleet.states() == anew, "the list is the caller's own"
    assert fleet.open_states() == [state for state in anew if not state.is_shut]
