"""Whose turn it is, over random histories of who wants something and who gets it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.tenant_shares import REMEMBERED, TenantShares

CREDIT = 1000

wanting = st.sets(st.sampled_from("ab"))
served = st.tuples(st.sampled_from("ab"), st.integers(1, 800))
history = st.lists(wanting | served, max_size=60)


def lead(shares: TenantShares) -> float:
    """How far `a` is before `b`."""
    return shares.tag("b") - shares.tag("a")


@given(history)
@settings(max_examples=300)
def test_what_somebody_has_had_is_not_forgotten_while_nobody_wants_anything(
    acts: list[set[str] | tuple[str, int]],
) -> None:
    """Whoever has had less, over whatever time, is before the other by that: or by the whole credit, less
    what it has had beyond the other's since. An engine's queue is empty between any two requests."""
    shares, more_for_b = TenantShares(CREDIT), [0]
    for act in acts:
        if isinstance(act, tuple):
            shares.charge(*act)
            more_for_b.append(more_for_b[-1] + (act[1] if act[0] == "b" else -act[1]))
        else:
            shares.contend(act)
        of_all, since = more_for_b[-1], [more_for_b[-1] - before for before in more_for_b]
        assert lead(shares) >= min(of_all, CREDIT + min(since))
        assert -lead(shares) >= min(-of_all, CREDIT - max(since))


@given(history)
@settings(max_examples=300)
def test_nobody_comes_back_with_more_than_the_credit(acts: list[set[str] | tuple[str, int]]) -> None:
    shares = TenantShares(CREDIT)
    for act in acts:
        if isinstance(act, tuple):
            shares.charge(*act)
        else:
            shares.contend(act)
    shares.contend("a")
    shares.contend("ab")
    assert lead(shares) >= -CREDIT
    shares.contend("")
    shares.contend("ab")
    assert abs(lead(shares)) <= CREDIT


@given(st.lists(st.tuples(st.text("abcdef", min_size=1, max_size=3), st.integers(1, 800)), max_size=200))
@settings(max_examples=100)
def test_who_stands_no_better_than_a_newcomer_is_forgotten(acts: list[tuple[str, int]]) -> None:
    """However many tenants come and go: only those who have had something in the last credit's worth stay."""
    shares = TenantShares(CREDIT)
    for tenant, num_tokens in acts:
        shares.contend([tenant])
        newcomer = shares.tag("nobody")
        shares.charge(tenant, num_tokens)
        shares.contend(())
        assert all(shares.tag(other) > newcomer for other in {name for name, _ in acts} if other in shares)
        assert tenant in shares


def test_many_that_come_once_each_are_not_all_remembered() -> None:
    shares = TenantShares(CREDIT)
    for number in range(3 * REMEMBERED):
        shares.contend([str(number)])
        shares.charge(str(number), 10)
        shares.contend(())
    assert len(shares) <= REMEMBERED + 1
    assert str(number) in shares
    assert shares.num_recent() == CREDIT // 10 + 1


@given(st.lists(st.integers(1, 300), min_size=1, max_size=80))
@settings(max_examples=100)
def test_who_asks_for_little_is_next_whenever_it_asks(sizes: list[int]) -> None:
    """Beside one that takes everything else, with gaps between: never made to wait for its turn."""
    shares = TenantShares(CREDIT)
    for number, size in enumerate(sizes):
        for _ in range(2):
            shares.contend(["much"])
            shares.charge("much", 300)
            shares.contend(())
        shares.contend(["much", "little"])
        assert shares.turn("little") < shares.turn("much"), number
        shares.charge("little", size)
