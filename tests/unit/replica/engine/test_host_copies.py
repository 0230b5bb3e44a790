"""Copies to and from host memory that fail cost nobody an answer, and are not tried for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cache.host_tier import BlockMoves
from replica.config import SimConfig
from replica.engine.host_copies import MAX_FAILED_COPIES
from replica.runners.sim_runner import SimRunner
from replica.scheduling.runner import CopyTime
from tests.fakes.engine import BLOCK_SIZE, VirtualClock, make_request, sim_core

NUM_BLOCKS = 8


class Copying(SimRunner):
    """Its copies fail as it is told to."""

    def __init__(self, fails: Callable[[int], bool]) -> None:
        """fails: whether the copy of that number does, from 1 on."""
        super().__init__(
            SimConfig(num_blocks=NUM_BLOCKS),
            block_size=BLOCK_SIZE,
            sleep=VirtualClock().sleep,
            host_cache_gib=0.001,
        )
        self._fails = fails
        self.num_copies = 0

    def copy_blocks(self, moves: BlockMoves) -> list[CopyTime]:
        self.num_copies += 1
        if self._fails(self.num_copies):
            raise RuntimeError("copying")
        return list(super().copy_blocks(moves))


def served_by(runner: Copying) -> int:
    """Twenty prompts that push each other out of the cache; how many answers came."""
    core = sim_core(NUM_BLOCKS, runner=runner)
    return sum([len(core.complete([make_request(f"r{i}", range(40 * i, 40 * i + 20))])) for i in range(20)])


def test_after_a_few_failures_in_a_row_host_memory_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    runner = Copying(lambda number: True)
    assert served_by(runner) == 20
    assert runner.num_copies == MAX_FAILED_COPIES
    told = [vars(record)["is_off"] for record in caplog.records if "copy to or from" in record.message]
    assert told == [False] * (MAX_FAILED_COPIES - 1) + [True]


def test_failures_between_copies_that_succeed_are_forgotten() -> None:
    runner = Copying(lambda number: number % MAX_FAILED_COPIES > 0)
    assert served_by(runner) == 20
    assert runner.num_copies > 2 * MAX_FAILED_COPIES
