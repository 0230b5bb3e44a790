"""Policies that look at load alone, or at nothing."""

from __future__ import annotations

from tests.fakes.policies import Bench, busy, candidates, cold


def test_random_draws_everybody_alike_whatever_the_load() -> None:
    drawn = Bench("random").choices([busy("a", 50), busy("b", 0), busy("c", 9)], cold("p"), times=600)
    assert set(drawn) == {"a", "b", "c"}
    assert min(drawn.values()) > 150


def test_least_outstanding_orders_by_requests_and_draws_among_equals() -> None:
    bench = Bench("least_outstanding")
    among = [busy("a", 3), busy("b", 1), busy("c", 2)]
    assert [scored.replica_id for scored in bench.rank(among, cold("p"))] == ["b", "c", "a"]
    assert [scored.cost for scored in bench.rank(among, cold("p"))] == [1, 2, 3]
    drawn = bench.choices([busy("a", 1), busy("b", 1), busy("c", 2)], cold("p"))
    assert set(drawn) == {"a", "b"}
    assert min(drawn.values()) > 60


def test_power_of_two_never_takes_the_most_loaded_of_all() -> None:
    """Of n replicas the most loaded loses every draw; the least loaded wins each it is in: 2 of 3 here."""
    drawn = Bench("power_of_two").choices([busy("a", 9), busy("b", 5), busy("c", 1)], cold("p"), times=900)
    assert drawn["a"] == 0
    assert 540 < drawn["c"] < 660
    assert drawn["b"] == 900 - drawn["c"]


def test_power_of_two_draws_among_equals() -> None:
    drawn = Bench("power_of_two").choices(candidates("abc"), cold("p"), times=600)
    assert min(drawn.values()) > 150
