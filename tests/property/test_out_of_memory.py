"""Law: a step that runs out of memory harms nobody; smaller ones follow, and every answer is the same.

Over the simulated runner, whose pages betray any block that was handed out and never computed.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.config import SimConfig
from replica.engine.engine_core import EngineCore
from replica.errors import ForwardFailed, StepOutOfMemory
from replica.runners.sim_runner import SimRunner
from replica.scheduling.runner import ScheduledSequence, StepResult
from replica.scheduling.step_budget import RECOVERY_STEPS, StepBudget
from tests.fakes.engine import BLOCK_SIZE, VirtualClock, known_pace, make_request, sim_config, sim_core

SIM = SimConfig(vocab_size=4)


class SmallMemory(SimRunner):
    """A step of more than `most` tokens does not fit. Steps that fit are remembered."""

    def __init__(self, most: int, num_blocks: int, num_layers: int) -> None:
        super().__init__(
            sim_config(num_blocks, sim=SIM).sim,
            block_size=BLOCK_SIZE,
            sleep=VirtualClock().sleep,
            num_layers=num_layers,
        )
        self.most = most
        self.sizes: list[int] = []
        self.num_refused = 0

    def execute(self, sequences: list[ScheduledSequence]) -> StepResult:
        num_tokens = sum(sequence.num_new_tokens for sequence in sequences)
        if num_tokens > self.most:
            self.num_refused += 1
            raise StepOutOfMemory(num_tokens, "OutOfMemoryError")
        self.sizes.append(num_tokens)
        return super().execute(sequences)


def small_core(
    most: int, num_blocks: int = 64, *, num_layers: int = 1, **options: object
) -> tuple[EngineCore, SmallMemory]:
    runner = SmallMemory(most, num_blocks, num_layers)
    return sim_core(num_blocks, runner=runner, sim=SIM, max_wait_s=None, **options), runner


prompts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=8)


@pytest.mark.parametrize(("num_layers", "itl_target_s"), [(1, math.inf), (8, 0.001)])
@given(prompts, st.integers(1, 40), st.booleans(), st.sampled_from([20, 64]), st.lists(st.integers(1, 40)))
@settings(max_examples=80)
def test_nobody_fails_and_every_answer_is_the_same(
    num_layers: int,
    itl_target_s: float,
    wanted: list[list[int]],
    most: int,
    prefix_caching: bool,
    num_blocks: int,
    changes: list[int],
) -> None:
    """Few token values, so that twins share a step's blocks; memory that comes and goes. Also where parts of
    prompts go through the layers one by one, since every step is over the limit."""
    options = {"prefix_caching": prefix_caching, "max_batched_tokens": 40, "itl_target_s": itl_target_s}
    with known_pace():
        core, runner = small_core(most, num_blocks, num_layers=num_layers, **options)
    requests = [
        make_request(f"r{i}", prompt, max_tokens=9, seed=i, temperature=float(i % 2))
        for i, prompt in enumerate(wanted)
    ]
    taken = [core.submit(request) for request in requests]
    for most_now in [*changes, most]:
        core.step()
        runner.most = most_now
    while core.has_work:
        assert all(progress.error is None for progress in core.step())
        stats = core.stats().cache
        assert stats.free + stats.used == stats.total
    for request, done in zip(requests, taken, strict=True):
        [alone] = sim_core(sim=SIM, prefix_caching=False).complete([request])
        assert tuple(done.token_ids[done.num_prompt_tokens :]) == alone.token_ids
    assert core.stats().cache.free == num_blocks


def test_twins_of_a_step_that_is_taken_back_compute_what_they_had_shared() -> None:
    """The second hits what the first computes in the same step: that step never was."""
    core, runner = small_core(most=12)
    prompt = list(range(18))
    for name in ("a", "b"):
        core.submit(make_request(name, [token % 4 for token in prompt], max_tokens=3))
    assert core.step() == []
    assert core.stats().cache.cached == 0
    assert (core.load().num_running, core.load().num_waiting) == (0, 2)
    core.step()
    assert runner.sizes == [10]  # half of 18 and 2


def test_decodes_that_share_the_step_stay_where_they_are() -> None:
    """Only who filled a block or came in with it starts anew: here that is the long prompt."""
    core, runner = small_core(most=16)
    short = core.submit(make_request("short", [1, 2], max_tokens=12))
    core.step()
    core.submit(make_request("long", [token % 3 for token in range(40)], max_tokens=1))
    core.step()
    assert runner.num_refused == 1
    assert (short.num_preemptions, len(short.blocks.block_table)) == (0, 1)
    assert core.report(epoch=1, number=1).out_of_memory_steps == 1
    assert core.report(epoch=1, number=1).step_budget == 20
    assert core.stats().num_failed_steps == 0


def test_while_memory_is_short_nobody_ends_beyond_the_budget() -> None:
    """Decodes' tokens included, steps have no more than half of what did not fit."""
    core, runner = small_core(most=20, max_batched_tokens=40)
    core.submit(make_request("first", [token % 4 for token in range(40)], max_tokens=12))
    for _ in range(3):
        core.step()
    core.submit(make_request("next", [token % 3 for token in range(39)], max_tokens=1))
    while core.has_work:
        core.step()
    assert runner.num_refused == 1
    assert runner.sizes[:5] == [20, 20, 1 + 19, 1 + 19, 1 + 1]


def test_a_single_token_that_does_not_fit_fails() -> None:
    core, _ = small_core(most=0)
    core.submit(make_request("r", [1, 2, 3, 0, 1], max_tokens=1))
    errors = []
    for _ in range(10):
        errors += [progress.error for progress in core.step()]
    assert [type(error) for error in errors] == [ForwardFailed]
    assert core.stats().cache.used == 0


def test_steps_grow_again() -> None:
    """A larger one is tried after some hundred that fitted, and never one above the configured size."""
    budget = StepBudget(100, max_running=64)
    assert budget.ran_out(100)
    assert (budget.tokens, budget.places) == (50, 50)
    assert budget.ran_out(40)
    sizes = []
    for _ in range(4 * RECOVERY_STEPS):
        budget.fitted()
        sizes.append(budget.tokens)
    assert (sizes[0], sizes[RECOVERY_STEPS - 1], sizes[2 * RECOVERY_STEPS - 1]) == (20, 40, 80)
    assert sizes[-1] == 100
    assert budget.places == 64
