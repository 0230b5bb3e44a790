"""How a start of several ranks ends, with stand-ins for the model and the other ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from replica.errors import RankLost
from replica.runners.parallel_runner import ParallelRunner
from replica.runners.start_guard import StartGuard
from replica.scheduling.runner import RunnerInfo

INFO = RunnerInfo("cpu", "gather_sdpa", "float32", 8, 16, 1024, 32, 64, frozenset())
LOST = RankLost(1, -9)


class Model:
    """Computes without noticing that a rank is lost meanwhile, as a sum over NCCL that was aborted may."""

    info = INFO

    def __init__(self, lose: Callable[[], None]) -> None:
        self._lose = lose

    def warm_up(self) -> float:
        self._lose()
        return 0.1


class OtherRanks:
    """Of whom the one that hears them has not told everybody yet."""

    pids = (1,)

    def lost(self) -> None:
        return None


@pytest.fixture
def has_ended() -> threading.Event:
    return threading.Event()


@pytest.fixture
def guard(has_ended: threading.Event) -> StartGuard:
    return StartGuard(has_ended.set, limit_s=60.0)


def started(guard: StartGuard, lose: Callable[[], None]) -> ParallelRunner:
    model: Any = Model(lose)
    others: Any = OtherRanks()
    return ParallelRunner(model, others, guard, guard.end)


def test_a_rank_that_is_lost_as_the_warm_up_ends_is_its_error(
    guard: StartGuard, has_ended: threading.Event
) -> None:
    with pytest.raises(RankLost) as caught:
        started(guard, lambda: guard.lost(LOST)).warm_up()
    assert caught.value is LOST
    assert not has_ended.is_set()


def test_a_rank_that_is_lost_before_a_first_step_is_its_error(
    guard: StartGuard, has_ended: threading.Event
) -> None:
    """Of a start without warm-up."""
    runner = started(guard, lambda: None)
    guard.lost(LOST)
    with pytest.raises(RankLost) as caught:
        runner.execute([])
    assert caught.value is LOST
    assert not has_ended.is_set()


def test_a_rank_that_is_lost_after_the_warm_up_ends_the_process(
    guard: StartGuard, has_ended: threading.Event
) -> None:
    assert started(guard, lambda: None).warm_up() == 0.1
    guard.lost(LOST)
    assert has_ended.is_set()
