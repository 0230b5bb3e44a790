"""Host memory changes when tokens come, never which: the simulated runner's pages betray any wrong block."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.host_tier import BlockMoves
from cache.messages import GenerateRequest
from cache.types import RequestId
from replica.config import SimConfig
from replica.engine.engine_core import EngineCore
from replica.errors import StepOutOfMemory
from replica.runners.sim_runner import SimRunner
from replica.scheduling.runner import CopyTime
from tests.fakes.engine import BLOCK_SIZE, VirtualClock, make_request, sim_core

NUM_BLOCKS = 14
BLOCK_BYTES = 8 * BLOCK_SIZE


class Unreliable(SimRunner):
    """One of so many copies does not fit, or raises; garbage is then left in host memory."""

    def __init__(self, every: int, num_slots: int) -> None:
        super().__init__(
            SimConfig(num_blocks=NUM_BLOCKS),
            block_size=BLOCK_SIZE,
            sleep=VirtualClock().sleep,
            host_cache_gib=gib(num_slots),
        )
        self._every = every
        self.num_copies = 0

    def copy_blocks(self, moves: BlockMoves) -> list[CopyTime]:
        self.num_copies += 1
        if self.num_copies % self._every == 0:
            for index in range(len(self._host_pages)):
                self._host_pages[index] = 0xBAD
            raise StepOutOfMemory(0, "copying") if self.num_copies % 2 else RuntimeError("copying")
        return list(super().copy_blocks(moves))


def gib(num_slots: int) -> float:
    return num_slots * BLOCK_BYTES / (1 << 30)


# (family of prompts, tokens of it, tokens of its own, answer, salt)
QUESTIONS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(0, 24),
        st.integers(1, 6),
        st.integers(1, 24),
        st.sampled_from(["", "a"]),
    ),
    min_size=4,
    max_size=14,
)


def requests(questions: list[tuple[int, int, int, int, str]]) -> list[GenerateRequest]:
    return [
        make_request(
            f"r{i}",
            [*range(100 * family, 100 * family + shared), *(500 + 7 * i + j for j in range(own))],
            max_tokens=length,
            temperature=0.5,
            seed=i,
            salt=salt,
        )
        for i, (family, shared, own, length, salt) in enumerate(questions)
    ]


def answers(core: EngineCore, wanted: list[GenerateRequest], at_once: int) -> list[tuple[int, ...]]:
    """So many at a time, then all of them again; the cap is kept after every step."""
    found: list[tuple[int, ...]] = []
    for again in range(2):
        left = [replace(r, request_id=RequestId(f"{r.request_id}.{again}")) for r in wanted]
        taken, steps = [], 0
        while left or core.has_work:
            while (
                left
                and len(core.load().admitted) + core.load().num_running + core.load().num_waiting < at_once
            ):
                taken.append(core.submit(left.pop(0)))
            steps += 1
            assert steps < 5000, "no progress"
            for progress in core.step():
                assert progress.error is None, progress.error
            host = core.stats().cache
            assert host.host_cached + host.host_swapped <= host.host_used <= host.host_total
        found += [tuple(request.token_ids[request.num_prompt_tokens :]) for request in taken]
    assert core.stats().cache.used == core.stats().cache.host_swapped == 0
    return found


def _plain(wanted: list[GenerateRequest], at_once: int) -> list[tuple[int, ...]]:
    return answers(sim_core(512, prefix_caching=False), wanted, at_once)


def _run(max_examples: int) -> Counter[str]:
    count: Counter[str] = Counter()

    @settings(max_examples=max_examples)
    @given(
        questions=QUESTIONS,
        num_slots=st.sampled_from([1, 4, 12, 60]),
        preemption=st.sampled_from(["recompute", "swap"]),
        discipline=st.sampled_from(["merge_on_fill", "append_only"]),
        at_once=st.integers(1, 8),
        budget=st.sampled_from([3, 16, 512]),
        copy_block_s=st.sampled_from([0.0, 1.0]),
        fails_every=st.sampled_from([0, 0, 5]),
    )
    def check(
        questions: list[tuple[int, int, int, int, str]],
        num_slots: int,
        preemption: str,
        discipline: str,
        at_once: int,
        budget: int,
        copy_block_s: float,
        fails_every: int,
    ) -> None:
        wanted = requests(questions)
        core = sim_core(
            NUM_BLOCKS,
            runner=Unreliable(fails_every, num_slots) if fails_every else None,
            sim=SimConfig(copy_block_s=copy_block_s),
            host_cache_gib=gib(num_slots),
            preemption=preemption,
            cache_discipline=discipline,
            max_batched_tokens=budget,
        )
        assert answers(core, wanted, at_once) == _plain(wanted, at_once)
        report = core.report(epoch=1, number=1)
        for name in ("host_hits", "host_declined", "swapped", "host_loads", "preemptions"):
            count[name] += getattr(report, name)
        count["failed"] += report.out_of_memory_steps

    check()
    return count


def test_the_same_tokens() -> None:
    count = _run(max_examples=25)
    assert all(count[name] > 0 for name in ("host_hits", "swapped", "failed", "preemptions")), count


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_same_tokens_long() -> None:
    count = _run(max_examples=80)
    assert all(count[name] > 0 for name in ("host_hits", "host_declined", "swapped", "failed")), count
