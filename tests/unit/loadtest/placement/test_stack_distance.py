"""One pass over a trace = a least-recently-used cache of every size, replayed."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from loadtest.placement.stack_distance import Use, hit_curve, stack_distances
from loadtest.workloads.generator_source import GeneratorSource
from loadtest.workloads.generators import make_generator
from loadtest.workloads.request import Workload, WorkRequest


def replayed_hits(uses: list[Use], capacity: int) -> int:
    """Leading blocks found, by a cache that is told every use: the head last."""
    cached: OrderedDict[object, None] = OrderedDict()
    hits = 0
    for use in uses:
        for block in use.chain[: use.num_usable]:
            if block not in cached:
                break
            hits += 1
        for block in reversed(use.chain):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hits


@st.composite
def many_uses(draw: st.DrawFn) -> list[Use]:
    """Chains of a random tree: a block's name is the path to it."""
    chains = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=30))
    named = [tuple(tuple(chain[: end + 1]) for end in range(len(chain))) for chain in chains]
    return [Use(chain, draw(st.integers(0, len(chain)))) for chain in named]


@given(many_uses(), st.integers(1, 60))
def test_agrees_with_a_replay_at_every_size(uses: list[Use], capacity: int) -> None:
    # A chain longer than the cache would push its own head out: an engine does not take such a request.
    capacity = max(capacity, *(len(use.chain) for use in uses))
    distances = list(stack_distances(uses))
    assert sum(distance <= capacity for distance in distances) == replayed_hits(uses, capacity)


def test_a_worked_curve() -> None:
    """Two sessions take turns; blocks of 10 tokens. The second turns find two blocks each."""
    rows = [(0.0, 25, (1, 2, 3)), (1.0, 25, (5, 6, 7)), (2.0, 30, (1, 2, 4)), (3.0, 20, (5, 6))]
    requests = tuple(WorkRequest(at, tokens, 1, blocks, blocks[0]) for at, tokens, blocks in rows)
    curve = hit_curve(Workload("made", 10, requests))
    # Found again: 1 and 2, then 5 (of 20 tokens the last is always computed); partial blocks do not count.
    # When 1 comes again, 5 and 6 lie above it; when 5 does, 1, 2 and 4 do.
    assert list(curve.distances) == [3, 4, 4]
    assert curve.total_tokens == 100
    assert curve.hit_ratio(29) == 0.0
    assert curve.hit_ratio(30) == 0.1
    assert curve.hit_ratio(40) == curve.most == 0.3
    assert curve.size_for(1.0) == 40
    assert curve.size_for(0.3) == 30


def test_nothing_reused_needs_no_cache() -> None:
    window = GeneratorSource(make_generator("no_reuse", {})).window(10.0, 50, 0)
    curve = hit_curve(window)
    assert (curve.most, curve.size_for(1.0)) == (0.0, 0)
