"""Each token of an answer is charged once, whether its client reads it or not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.events import RequestEnded
from cache.types import RequestId
from router.dispatch.token_accounts import FORGOTTEN_AFTER_S, TokenAccount, TokenAccounts
from tests.fakes.router import FakeClock

NAME = RequestId("r")


def ended(num_tokens: int, attempt: int = 0, name: RequestId = NAME) -> RequestEnded:
    return RequestEnded(name, attempt, num_tokens)


@given(
    # Of each attempt: tokens that are computed, those of them that are read, and when the engine says so.
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 3)), min_size=1, max_size=4)
)
def test_what_is_charged_is_what_was_read_and_what_the_last_attempt_has_computed(
    attempts: list[tuple[int, int, int]],
) -> None:
    charges: list[int] = []
    accounts, account = TokenAccounts(FakeClock()), TokenAccount(charges.append, most=10_000)
    num_read = most = before = 0
    for attempt, (computed, wanted, say_after) in enumerate(attempts):
        account.begin(attempt)
        accounts.open(NAME, account)
        before = num_read
        for step in range(min(computed, wanted)):
            if step >= say_after:
                accounts.told(ended(computed, attempt))
                most = max(most, before + computed)
            accounts.told(ended(1000, attempt - 1))  # of an earlier one: too late
            account.read(1)
            num_read += 1
        most = max(most, num_read)
        assert sum(charges) == account.num_charged == most
    accounts.close(NAME, is_whole=False)
    for attempt, (computed, _, _) in enumerate(attempts):
        accounts.told(ended(computed, attempt))
    assert sum(charges) == max(most, before + attempts[-1][0])
    assert len(accounts) == 0
    assert all(more > 0 for more in charges)


def test_who_leaves_is_charged_what_an_engine_tells_afterwards_once() -> None:
    charges: list[int] = []
    accounts, account = TokenAccounts(FakeClock()), TokenAccount(charges.append, most=9)
    accounts.open(NAME, account)
    account.read(3)
    accounts.close(NAME, is_whole=False)
    accounts.told(ended(9, name=RequestId("another router's")))
    accounts.told(ended(9))
    accounts.told(ended(9))  # as it was held back, and then in its place
    assert charges == [3, 6]
    assert len(accounts) == 0


def test_an_earlier_attempts_end_told_late_leaves_the_present_one_charged() -> None:
    """The account was forgotten with it, and what the present attempt computed was nobody's."""
    charges: list[int] = []
    accounts, account = TokenAccounts(FakeClock()), TokenAccount(charges.append, most=1000)
    for attempt, num_read in enumerate([10, 5]):
        account.begin(attempt)
        accounts.open(NAME, account)
        account.read(num_read)
    accounts.close(NAME, is_whole=False)
    accounts.told(ended(40, attempt=0))
    accounts.told(ended(300, attempt=1))
    assert (sum(charges), len(accounts)) == (310, 0)


@pytest.mark.parametrize("is_told", [True, False])
def test_of_whom_no_engine_has_more_to_tell_nothing_is_kept(is_told: bool) -> None:
    """What an engine refuses it never tells of, nor twice of what has ended before its client left."""
    accounts, account = TokenAccounts(FakeClock()), TokenAccount(lambda _: None, most=9)
    accounts.open(NAME, account)
    if is_told:
        accounts.told(ended(9))
    else:
        account.refused()
    assert len(accounts) == 1  # it may go on in another attempt
    accounts.close(NAME, is_whole=False)
    assert len(accounts) == 0


def test_who_was_refused_and_then_taken_in_is_charged_what_is_told_of_that() -> None:
    """Its account was settled by the refusal, and so forgotten as its client left."""
    charges: list[int] = []
    accounts, account = TokenAccounts(FakeClock()), TokenAccount(charges.append, most=9)
    account.begin(0)
    accounts.open(NAME, account)
    account.refused()
    account.begin(1)
    accounts.open(NAME, account)
    accounts.close(NAME, is_whole=False)
    accounts.told(ended(9, attempt=1))
    assert (charges, len(accounts)) == ([9], 0)


def test_a_name_that_comes_again_is_not_forgotten_for_its_first_request() -> None:
    charges: list[int] = []
    clock = FakeClock()
    accounts = TokenAccounts(clock)
    accounts.open(NAME, TokenAccount(lambda _: None, most=9))
    accounts.close(NAME, is_whole=False)
    clock.advance(FORGOTTEN_AFTER_S)
    accounts.open(NAME, TokenAccount(charges.append, most=9))
    accounts.close(RequestId("other"), is_whole=False)
    accounts.told(ended(9))
    assert charges == [9]


@pytest.mark.parametrize("what", ["open", "told", "close"])
def test_whatever_comes_next_forgets_those_that_were_not_told_of_in_time(what: str) -> None:
    """Only the next request that closed did: without one they were kept for good."""
    clock, other = FakeClock(), RequestId("other")
    accounts = TokenAccounts(clock)
    accounts.open(NAME, TokenAccount(lambda _: None, most=1))
    accounts.close(NAME, is_whole=False)
    clock.advance(FORGOTTEN_AFTER_S)
    if what == "open":
        accounts.open(other, TokenAccount(lambda _: None, most=1))
    elif what == "told":
        accounts.told(ended(1, name=other))
    else:
        accounts.close(other, is_whole=True)
    assert len(accounts) == (what == "open")


def test_no_more_is_charged_than_was_asked_for() -> None:
    charges: list[int] = []
    account = TokenAccount(charges.append, most=8)
    account.told(ended(1 << 60))
    assert charges == [8]


def test_only_those_that_may_still_be_told_of_are_kept() -> None:
    clock = FakeClock()
    accounts = TokenAccounts(clock)
    for number in range(3):
        name = RequestId(f"{number}")
        accounts.open(name, TokenAccount(lambda _: None, most=1))
        accounts.close(name, is_whole=number == 1)
        clock.advance(1.0)
    assert len(accounts) == 2
    clock.advance(FORGOTTEN_AFTER_S - 2.5)
    accounts.close(RequestId("never opened"), is_whole=False)
    assert len(accounts) == 1
    clock.advance(FORGOTTEN_AFTER_S)
    accounts.close(RequestId("2"), is_whole=False)  # once more, and too late
    assert len(accounts) == 0
