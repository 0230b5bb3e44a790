"""Laws of autoscaling: bounded, never fewer for more work, and settled under a load that does not change."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from deploy.wanted_replicas import MOST_GROWTH, Fleet, Targets, wanted_replicas
from router.placement.refused_work import RefusedWork

TARGETS = st.builds(Targets, target_queued_s=st.floats(0.01, 60.0), target_busy=st.floats(0.1, 0.95))


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    least = draw(st.integers(1, 10))
    most = draw(st.integers(least, 200))
    running = draw(st.integers(0, 200))
    return Fleet(
        num_running=running,
        num_target=draw(st.integers(0, 200)),
        num_silent=draw(st.integers(0, running)),
        queued_s=draw(st.floats(0.0, 1e6)),
        busy=draw(st.floats(0.0, float(running))),
        refused=draw(st.floats(0.0, 4.0 * running)),
        least=least,
        most=most,
    )


@given(fleets(), TARGETS)
def test_within_bounds_and_no_further_than_allowed_at_once(fleet: Fleet, targets: Targets) -> None:
    wanted = wanted_replicas(fleet, targets)
    assert fleet.least <= wanted <= fleet.most
    current = min(max(fleet.num_target, fleet.least), fleet.most)
    assert current - 1 <= wanted <= max(current, MOST_GROWTH * fleet.num_running)
    if fleet.num_silent or fleet.num_running < fleet.num_target:
        assert wanted >= current


@given(fleets(), TARGETS, st.floats(0.0, 1e6), st.floats(0.0, 200.0), st.floats(0.0, 200.0))
def test_more_work_never_wants_fewer(
    fleet: Fleet, targets: Targets, queued_s: float, busy: float, refused: float
) -> None:
    more = replace(
        fleet,
        queued_s=fleet.queued_s + queued_s,
        busy=fleet.busy + busy,
        refused=fleet.refused + refused,
    )
    assert wanted_replicas(more, targets) >= wanted_replicas(fleet, targets)


@given(
    TARGETS,
    st.floats(0.0, 40.0),
    st.integers(1, 60),
    st.floats(0.0, 1000.0),
    st.floats(0.0, 60.0),
    st.integers(1, 3),
)
def test_under_a_constant_load_it_settles(
    targets: Targets, offered: float, start: int, queued_s: float, most_wait_s: float, times: int
) -> None:
    """A fleet in virtual seconds: so much work comes each second, what is not done waits, Routers refuse what
    would wait too long, so many times. Wherever it begins, the number ends where it stays: enough, and not
    too many."""
    least, most = 1, 60
    assume(offered <= targets.target_busy * most)
    number = start
    numbers = []
    for _ in range(400):
        done = float(min(number, queued_s + offered))
        left_s = queued_s + offered - done
        queued_s = min(left_s, most_wait_s * number)
        refused = _refused(times * (left_s - queued_s), done, number)
        number = wanted_replicas(Fleet(number, number, 0, queued_s, done, refused, least, most), targets)
        numbers.append(number)
    settled = numbers[-1]
    assert numbers[-100:] == [settled] * 100
    assert offered <= targets.target_busy * settled + 1e-6
    assert settled == least or offered > 0.75 * targets.target_busy * (settled - 1) - 1e-6


@given(TARGETS, st.floats(0.1, 400.0), st.integers(1, 60))
def test_what_is_refused_doubles_them_until_there_are_enough(
    targets: Targets, offered: float, start: int
) -> None:
    """Routers that let nobody wait: no queue says that there are too few, nor how many more it takes."""
    number = start
    for _ in range(math.ceil(math.log2(max(1.0, offered / targets.target_busy / start))) + 2):
        done = min(float(number), offered)
        refused = _refused(offered - done, done, number)
        number = wanted_replicas(Fleet(number, number, 0, 0.0, done, refused, 1, 10_000), targets)
    assert offered <= targets.target_busy * number + 1e-6


def _refused(refused_s: float, placed_s: float, number: int) -> float:
    """As Routers tell it and the policy sums it up."""
    work = RefusedWork()
    work.refused(refused_s, 0.0)
    work.placed(placed_s, 0.0)
    return number * work.ratio


@given(TARGETS, st.floats(0.5, 40.0), st.lists(st.floats(-0.1, 0.1), min_size=200, max_size=200))
def test_a_tenth_of_noise_changes_nothing_once_it_has_settled(
    targets: Targets, offered: float, noise: list[float]
) -> None:
    """What is up to 10% off either way moves the number in one direction at most: nothing is taken back."""
    least, most = 1, 1000
    number = 1
    for _ in range(400):  # settled for the middle
        busy = min(float(number), offered)
        number = wanted_replicas(Fleet(number, number, 0, 0.0, busy, 0.0, least, most), targets)
    directions = set()
    for off in noise:
        busy = min(float(number), offered * (1 + off))
        wanted = wanted_replicas(Fleet(number, number, 0, 0.0, busy, 0.0, least, most), targets)
        directions |= {wanted > number} if wanted != number else set()
        number = wanted
    assert len(directions) <= 1
