"""Each token of an answer is charged once, whether its client reads it or not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache.events import RequestEnded
from cache.types import RequestId
from router.token_accounts import FORGOTTEN_AFTER_S, TokenAccount, TokenAccounts
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
    account = TokenAccount(charges.append, most=10_000)
    num_read = most = before = 0
    for attempt, (computed, wanted, say_after) in enumerate(attempts):
        account.begin(attempt)
        before = num_read
        for step in range(min(computed, wanted)):
            if step >= say_after:
                account.told(ended(computed, attempt))
                most = max(most, before + computed)
            account.told(ended(1000, attempt - 1))  # of an earlier one: too late
            account.read(1)
            num_read += 1
        most = max(most, num_read)
        assert sum(charges) == account.num_charged == most
    account.told(ended(attempts[-1][0], len(attempts) - 1))
    assert sum(charges) == max(most, before + attempts[-1][0])
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
    accounts.close(RequestId("2"), is_whole=False)
    assert len(accounts) == 1  # anew
    accounts.told(ended(1, name=RequestId("2")))
    assert len(accounts) == 0
