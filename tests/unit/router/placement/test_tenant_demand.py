"""Who asks for more than its part: worked examples, and what holds for any demand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.tenant_demand import MEMORY_S, TenantDemand


def demand(asked: dict[str, int], placed: int, shares: dict[str, float] | None = None) -> TenantDemand:
    made = TenantDemand()
    for tenant, tokens in asked.items():
        made.came(tenant, tokens, (shares or {}).get(tenant, 1.0), 0.0)
    made.placed(placed, 0.0)
    return made


def test_of_two_the_one_below_half_of_what_is_placed_is_within_its_share() -> None:
    made = demand({"calm": 400, "greedy": 4000}, placed=1000)
    assert made.is_within_share("calm", 0.0)
    assert not made.is_within_share("greedy", 0.0)


def test_two_that_both_ask_for_too_much_are_both_told_so() -> None:
    made = demand({"a": 2000, "b": 2000}, placed=1000)
    assert not made.is_within_share("a", 0.0)
    assert not made.is_within_share("b", 0.0)


@pytest.mark.parametrize(("share", "is_within"), [(1.0, False), (4.0, True)])
def test_a_larger_share_is_a_larger_part(share: float, is_within: bool) -> None:
    made = demand({"a": 700, "b": 2000}, placed=1000, shares={"a": share})
    assert made.is_within_share("a", 0.0) is is_within


def test_who_is_alone_or_unknown_is_not_asked() -> None:
    made = demand({"a": 100}, placed=1000)
    assert not made.is_within_share("a", 0.0)
    assert not made.is_within_share("b", 0.0)


def test_tenants_are_forgotten() -> None:
    made = demand({str(number): 100 for number in range(1000)}, placed=1000)
    for step in range(1, 21):
        made.came("one", 1000, 1.0, step * MEMORY_S)
    assert list(made._asked) == ["one"]


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 10_000), min_size=2), st.floats(0.01, 1.0))
def test_in_overload_somebody_asks_for_too_much(asked: dict[str, int], served: float) -> None:
    """Where less is placed than was asked for, not all can be within their shares."""
    made = demand(asked, placed=int(0.99 * served * sum(asked.values())))
    assert not all(made.is_within_share(tenant, 0.0) for tenant in asked)
