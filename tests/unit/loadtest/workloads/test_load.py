"""A load is reached with more or fewer sessions at a time, never by squeezing time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from loadtest.workloads.errors import WorkloadError
from loadtest.workloads.generator_source import GeneratorSource
from loadtest.workloads.generators import make_generator
from loadtest.workloads.load import TOLERANCE, Source, at_load, at_rate
from loadtest.workloads.request import Workload, WorkRequest
from loadtest.workloads.trace_source import TraceSource


def trace() -> TraceSource:
    """200 sessions of three turns each, 7 s apart, one beginning every second; block 0 is everybody's."""
    turns = [
        (session + 7.0 * turn, session, tuple([0, *range(1 + 10 * session, 2 + 10 * session + turn)]))
        for session in range(200)
        for turn in range(3)
    ]
    requests = [
        WorkRequest(time_s, 16 * len(blocks), 5, blocks, session) for time_s, session, blocks in sorted(turns)
    ]
    return TraceSource(Workload("made", 16, tuple(requests)))


def fixed_saturation(workload: Workload) -> float:
    return 10.0


SOURCES = [trace(), GeneratorSource(make_generator("multi_turn", {"think_s": 4.0}))]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
class TestEverySource:
    @pytest.mark.parametrize("load", [0.05, 0.6, 0.85, 1.05, 4.0])
    def test_reaches_the_load(self, source: Source, load: float) -> None:
        found = at_load(source, load, fixed_saturation, num_requests=600, seed=1)
        assert found.load == pytest.approx(load, rel=5 * TOLERANCE)
        assert len(found.workload.requests) == 600
        assert found.workload.requests[0].arrival_s == 0.0

    @pytest.mark.parametrize("seed", range(4))
    def test_a_rate_is_the_windows_own(self, source: Source, seed: int) -> None:
        """What a source draws at 4/s comes at 3 to 5: too far off to be a server's capacity."""
        found = at_rate(source, 4.0, num_requests=240, seed=seed)
        assert found.rate_per_s == pytest.approx(4.0, rel=2 * TOLERANCE)
        assert len(found.requests) == 240

    def test_a_seed_says_everything(self, source: Source) -> None:
        windows = [
            at_load(source, 0.85, fixed_saturation, num_requests=300, seed=seed).workload
            for seed in (1, 1, 2)
        ]
        assert windows[0] == windows[1] != windows[2]

    def test_equal_ids_name_equal_prefixes(self, source: Source) -> None:
        parents: dict[int, int | None] = {}
        for request in source.window(40.0, 800, seed=2).requests:
            parent: int | None = None
            for block in request.block_ids:
                assert parents.setdefault(block, parent) == parent
                parent = block

    def test_refuses_a_load_of_nothing(self, source: Source) -> None:
        with pytest.raises(WorkloadError, match="not positive"):
            at_load(source, 0.0, fixed_saturation, num_requests=100, seed=0)


@pytest.mark.parametrize("rate_per_s", [0.7, 3.0, 30.0])
def test_gaps_inside_a_session_stay_what_they_were(rate_per_s: float) -> None:
    times: dict[int, list[float]] = defaultdict(list)
    for request in trace().window(rate_per_s, 900, seed=5).requests:
        times[request.session].append(request.arrival_s)
    gaps = [b - a for session in times.values() for a, b in pairwise(session)]
    assert len(gaps) > 100
    assert gaps == pytest.approx([7.0] * len(gaps))


def test_sessions_laid_over_each_other_share_the_head_alone() -> None:
    owners: dict[int, set[int]] = defaultdict(set)
    for request in trace().window(30.0, 900, seed=5).requests:
        for block in request.block_ids:
            owners[block].add(request.session)
    assert len(owners.pop(0)) > 300
    assert all(len(sessions) == 1 for sessions in owners.values())


def test_a_lower_rate_leaves_out_whole_sessions() -> None:
    window = trace().window(1.5, 250, seed=0)
    turns: dict[int, int] = defaultdict(int)
    for request in window.requests:
        turns[request.session] += 1
    inside = [
        count
        for session, count in turns.items()
        if any(
            r.session == session and 14.0 < r.arrival_s < window.duration_s - 14.0 for r in window.requests
        )
    ]
    assert sum(count == 3 for count in inside) > 0.8 * len(inside)


@pytest.mark.parametrize("rate_per_s", [1.2, 2.4, 6.0, 15.0, 30.0])
def test_seeds_begin_far_apart(rate_per_s: float) -> None:
    """Windows of the same requests would pass one measurement off as several."""
    one_visitor_a_second = tuple(
        WorkRequest(float(number), 16, 5, (number,), number) for number in range(12_000)
    )
    source = TraceSource(Workload("visitors", 16, one_visitor_a_second))
    windows = [
        {request.session % 12_000 for request in source.window(rate_per_s / 3.4, 3500, seed).requests}
        for seed in range(5)
    ]
    shared = [len(a & b) / 3500 for a, b in combinations(windows, 2)]
    assert max(shared) < 0.55
    assert sum(shared) / len(shared) < 0.3  # by chance: 0.29


def test_a_saturation_that_depends_on_the_window_is_followed() -> None:
    """The denser, the fewer hits, the sooner full: the fixed point is found all the same."""

    def saturation(workload: Workload) -> float:
        return 30.0 / (1.0 + 0.05 * workload.rate_per_s)

    found = at_load(trace(), 0.85, saturation, num_requests=900, seed=7)
    assert found.workload.rate_per_s / saturation(found.workload) == pytest.approx(0.85, rel=5 * TOLERANCE)


def test_a_session_that_leaves_no_window_is_told() -> None:
    """An application that names all its traffic one session; nobody knew why there was no window."""
    many = tuple(WorkRequest(float(n), 16, 5, (n,), n) for n in range(400))
    one = tuple(replace(request, session=0) for request in many)

    def load_of(requests: tuple[WorkRequest, ...]) -> float:
        source = TraceSource(Workload("visitors", 16, requests))
        return at_load(source, 0.6, lambda workload: 1.0, num_requests=200, seed=0).load

    assert load_of(many) == pytest.approx(0.6, rel=5 * TOLERANCE)
    with pytest.raises(WorkloadError, match="one has 100% of these requests"):
        load_of(one)


def test_a_trace_without_duration_has_no_rate() -> None:
    at_once = tuple(WorkRequest(0.0, 16, 1, (number,), number) for number in range(3))
    with pytest.raises(WorkloadError, match="at once"):
        TraceSource(Workload("burst", 16, at_once))


def ticking() -> TraceSource:
    """Forty requests an instant, an instant every 3 s."""
    requests = [WorkRequest(3.0 * (n // 40), 16, 1, (n,), n) for n in range(400)]
    return TraceSource(Workload("ticking", 16, tuple(requests)))


def test_a_window_of_one_instant_is_no_crash() -> None:
    """A few requests of a trace whose clock is coarse."""
    drawn = at_rate(ticking(), 1000.0, num_requests=4, seed=0)
    assert {request.arrival_s for request in drawn.requests} == {0.0}
    with pytest.raises(WorkloadError, match="the nearest of 2 requests has"):
        at_load(ticking(), 0.85, lambda workload: 1000.0, num_requests=2, seed=0)


def test_a_window_too_short_for_a_load_says_what_comes_nearer() -> None:
    with pytest.raises(WorkloadError, match=r"has 16\.333: longer windows \(--requests\) come nearer"):
        at_load(ticking(), 20.0, lambda workload: 1.0, num_requests=50, seed=0)
    assert at_load(ticking(), 20.0, lambda workload: 1.0, num_requests=60, seed=0).load > 19.5
