"""A rank that is lost while rank 0 starts is raised there; what does not come back to raise it ends."""

from __future__ import annotations

import threading

import pytest

from replica.errors import RankLost
from replica.runners.start_guard import StartGuard

WAIT_S = 60.0  # for other threads
LOST = RankLost(1, -9)


class Guarded:
    def __init__(self, limit_s: float) -> None:
        self.is_over, self.is_aborted = threading.Event(), threading.Event()
        self.guard = StartGuard(self.is_over.set, limit_s=limit_s)

    def join(self) -> None:
        for thread in threading.enumerate():
            if thread.name == "warmpath-start-guard":
                thread.join(WAIT_S)
                assert not thread.is_alive()


def test_a_replica_that_serves_ends_at_once() -> None:
    guarded = Guarded(WAIT_S)
    guarded.guard.serves()
    guarded.guard.lost(LOST)
    assert guarded.is_over.is_set()


def test_a_start_that_raises_it_has_been_told() -> None:
    guarded = Guarded(WAIT_S)
    guarded.guard.meets(guarded.is_aborted.set)
    guarded.guard.lost(LOST)
    assert guarded.is_aborted.wait(WAIT_S)
    guarded.guard.end()
    guarded.join()
    assert not guarded.is_over.is_set()


def test_a_rank_that_is_lost_as_the_start_ends_is_raised_and_ends_nothing() -> None:
    """The start succeeded, and its process ended a minute later."""
    guarded = Guarded(WAIT_S)
    guarded.guard.meets(guarded.is_aborted.set)
    guarded.guard.lost(LOST)
    for _ in range(2):
        with pytest.raises(RankLost) as caught:
            guarded.guard.serves()
        assert caught.value is LOST
    guarded.join()
    assert not guarded.is_over.is_set()


def test_a_start_that_does_not_come_back_ends_even_where_the_abort_hangs() -> None:
    guarded, goes_on = Guarded(0.01), threading.Event()

    def hang() -> None:
        goes_on.wait(WAIT_S)

    guarded.guard.meets(hang)
    guarded.guard.lost(LOST)
    assert guarded.is_over.wait(WAIT_S)
    goes_on.set()
    guarded.join()


def test_loading_takes_as_long_as_it_takes() -> None:
    """Who loads notices when it is done: nothing can be interrupted there."""
    guarded = Guarded(0.0)
    guarded.guard.lost(LOST)
    assert not guarded.is_over.is_set()
    guarded.guard.meets(guarded.is_aborted.set)
    assert guarded.is_over.wait(WAIT_S)
    guarded.join()
    assert guarded.is_aborted.is_set()


def test_a_start_that_ends_before_ranks_meet_leaves_no_thread() -> None:
    guarded = Guarded(0.0)
    guarded.guard.lost(LOST)
    guarded.guard.end()
    guarded.join()
    assert not guarded.is_over.is_set()


def test_a_rank_that_is_lost_after_a_start_has_ended_aborts_nothing() -> None:
    """The group is being left then."""
    guarded = Guarded(0.0)
    guarded.guard.meets(guarded.is_aborted.set)
    guarded.guard.end()
    guarded.guard.lost(LOST)
    guarded.join()
    assert not guarded.is_aborted.is_set()
    assert not guarded.is_over.is_set()
