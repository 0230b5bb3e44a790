"""Copies to and from host memory that fail cost nobody an answer, and are not tried for ever."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from cache.host_tier import BlockMoves
from replica.config import SimConfig
from replica.engine.host_copies import MAX_FAILED_COPIES
from replica.runners.sim_runner import SimRunner
from replica.scheduling.copy_pace import ASK_AGAIN
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


class Slow(SimRunner):
    """Copies take a thousand seconds a block until `is_slow` says otherwise."""

    is_slow = True

    def copy_blocks(self, moves: BlockMoves) -> list[CopyTime]:
        copies = super().copy_blocks(moves)
        return [
            replace(copy, elapsed_s=1000.0 * copy.num_blocks) if self.is_slow else copy for copy in copies
        ]


@pytest.mark.parametrize("num_gone", [0, 1])
def test_copies_that_are_fast_again_are_found_out(num_gone: int) -> None:
    """Whoever else was looked up, and left before it began."""
    sim = SimConfig(num_blocks=40, copy_block_s=0.0)
    runner = Slow(sim, block_size=BLOCK_SIZE, sleep=VirtualClock().sleep, host_cache_gib=0.001)
    core = sim_core(40, runner=runner, sim=sim)
    prompts = [[100 * family + token for token in range(80)] for family in range(4)]
    asked = itertools.count()

    def ask() -> None:
        number = next(asked)
        core.complete([make_request(f"r{number}", [*prompts[number % 4], 900], max_tokens=1)])

    for _ in range(40):
        ask()
    assert core.report(epoch=1, number=1).host_declined > 0
    for number in range(num_gone):
        core.cancel(core.submit(make_request(f"gone{number}", [*prompts[0], 901])).request_id)
    runner.is_slow = False
    before = core.report(epoch=1, number=2).host_loads
    for _ in range(ASK_AGAIN + 1):
        ask()
    assert core.report(epoch=1, number=3).host_loads > before
