"""The simulated machine: its time, its faults, and that its pages betray a wrong block."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from cache.messages import SamplingParams
from cache.types import RequestId
from replica.config import SimConfig
from replica.runners.sim_runner import SimRunner, SimulatedFault
from replica.scheduling.runner import ScheduledSequence
from tests.fakes.engine import VirtualClock

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def sequence(
    tokens: list[int], table: list[int], start: int = 0, end: int | None = None
) -> ScheduledSequence:
    return ScheduledSequence(
        request_id=RequestId("r"),
        token_ids=array("i", tokens),
        block_table=table,
        start=start,
        num_new_tokens=(len(tokens) if end is None else end) - start,
        num_prompt_tokens=len(tokens),
        sampling=GREEDY,
        seed=0,
    )


def runner(clock: VirtualClock | None = None, **settings: float) -> SimRunner:
    sim = SimConfig(**{"num_blocks": 16, **settings})  # type: ignore[arg-type]
    return SimRunner(sim, block_size=4, sleep=(clock or VirtualClock()).sleep)


def test_step_takes_what_the_model_says() -> None:
    clock = VirtualClock()
    machine = runner(
        clock, base_s=1.0, per_token_s=0.1, per_attention_s=0.01, per_sequence_s=0.5, slowdown=2.0
    )
    # 6 tokens alone, and 1 after 5: attention 6 * 3 + 1 * 5.5
    result = machine.execute(
        [sequence([1] * 6, [0, 1]), replace(sequence([1] * 6, [2, 3], start=5), request_id=RequestId("s"))]
    )
    assert result.elapsed_s == clock.now_s == pytest.approx(2.0 * (1.0 + 0.7 + 0.235 + 1.0))


def test_chunks_give_the_token_of_the_whole() -> None:
    tokens = list(range(11))
    [whole] = runner().execute([sequence(tokens, [0, 1, 2])]).next_tokens
    machine = runner()
    assert machine.execute([sequence(tokens, [5, 3, 9], 0, 5)]).next_tokens == (None,)
    assert machine.execute([sequence(tokens, [5, 3, 9], 5)]).next_tokens == (whole,)


def test_every_earlier_token_matters() -> None:
    outputs = {
        runner().execute([sequence([first, *range(30)], list(range(8)))]).next_tokens for first in range(40)
    }
    assert len(outputs) > 35  # of 1000 tokens; chance alone makes a few meet


def test_a_wrong_block_changes_the_output() -> None:
    """As it would with a model: a decode that reads a block it should not."""
    tokens = list(range(9))
    machine = runner()
    [right] = machine.execute([sequence(tokens, [0, 1, 2])]).next_tokens
    machine.execute([sequence([7] * 8, [4, 5])])
    assert machine.execute([sequence(tokens, [0, 5, 6], start=8)]).next_tokens != (right,)
    assert machine.execute([sequence(tokens, [0, 9, 6], start=8)]).next_tokens != (right,)  # never computed
    assert machine.execute([sequence(tokens, [0, 1, 6], start=8)]).next_tokens == (right,)


def test_fails_when_told_and_stays_usable() -> None:
    machine = runner(raise_every_steps=2)
    step = [sequence([1], [0])]
    first = machine.execute(step).next_tokens
    with pytest.raises(SimulatedFault):
        machine.execute(step)
    assert machine.execute(step).next_tokens == first


def test_hangs_when_told() -> None:
    hung = []
    sim = SimConfig(num_blocks=4, hang_after_steps=1)
    machine = SimRunner(sim, block_size=4, sleep=lambda _: None, hang=lambda: hung.append(True))
    machine.execute([sequence([1], [0])])
    assert hung == []
    machine.execute([sequence([1], [0])])
    assert hung == [True]


def test_a_step_that_really_took_longer_says_so() -> None:
    """A process stopped and continued from outside is a slower machine."""
    clock = VirtualClock()
    sim = SimConfig(num_blocks=16, base_s=0.01)

    def late(seconds: float) -> None:
        clock.sleep(10 * seconds)

    machine = SimRunner(sim, block_size=4, sleep=late, clock=lambda: clock.now_s)
    step = [sequence([1], [0])]
    assert machine.execute(step).elapsed_s == pytest.approx(10 * runner(base_s=0.01).execute(step).elapsed_s)
