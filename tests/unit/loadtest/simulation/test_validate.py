"""What the comparison with real replicas stands on: its workload, its fit, its verdict."""

from __future__ import annotations

import numpy as np
import pytest

from cache.block_hash import BlockHasher
from cache.events import StepTimeModel
from loadtest.simulation.real_fleet import token_ids
from loadtest.simulation.real_replica import Step
from loadtest.simulation.turns import fingerprint, make_turns
from loadtest.simulation.validate import BLOCK_TOKENS, Comparison, changed_places, conversations, fit
from replica.scheduling.step_time import StepWork


def comparison(policy: str, real: list[float], simulated: list[float]) -> Comparison:
    none = np.zeros(len(real), dtype=np.int64)
    return Comparison(policy, np.array(real), np.array(simulated), none, none, 1, stolen=0.0, busy=0.5)


def test_the_fit_finds_the_model_of_exact_steps() -> None:
    model = StepTimeModel(0.01, 0.0004, 3e-7, 0.002)
    steps = []
    for sequences in range(1, 9):
        for chunk in (0, 100, 400):
            new, attention = sequences + chunk, 300.0 * sequences + chunk * chunk / 2
            elapsed_s = model.step_s(new, attention, sequences)
            steps.append(Step(StepWork(new, attention, sequences), elapsed_s / 4, elapsed_s))
    found = fit(steps)
    for step in steps:
        assert found.step_s(*step.work) == pytest.approx(step.elapsed_s)


def test_the_fit_has_no_negative_terms() -> None:
    """Longer steps that took less: noise, not work that gives time back."""
    steps = [
        Step(StepWork(new, 0.0, 1), 0.01, elapsed_s) for new, elapsed_s in ((1, 0.02), (100, 0.01), (2, 0.03))
    ]
    found = fit(steps)
    assert min(found.base_s, found.per_token_s, found.per_attention_s, found.per_sequence_s) >= 0
    assert found.base_s == pytest.approx(0.02)


def test_within_fifteen_percent_of_the_mean() -> None:
    assert comparison("a", [1.0, 3.0], [1.1, 3.1]).is_close
    assert comparison("a", [1.0, 3.0], [1.1, 3.1]).ratio == pytest.approx(1.05)
    assert not comparison("a", [1.0, 1.0], [1.2, 1.2]).is_close
    assert not comparison("a", [1.0, 1.0], [0.8, 0.8]).is_close


def test_a_changed_order_is_told_where_both_are_sure() -> None:
    """Half a second's difference on each of a hundred requests, the other way round in the simulation."""
    base = np.random.default_rng(0).random(100)
    low, high = list(base), list(base + 0.5 + 0.01 * np.arange(100) % 0.1)
    swapped = [comparison("a", low, high), comparison("b", high, low)]
    assert changed_places(swapped) == [("a", "b")]
    assert changed_places([comparison("a", low, low), comparison("b", high, high)]) == []


def test_a_changed_order_within_the_scatter_is_none() -> None:
    draw = np.random.default_rng(0)
    noise = [list(1.0 + draw.random(100)) for _ in range(4)]
    assert changed_places([comparison("a", noise[0], noise[1]), comparison("b", noise[2], noise[3])]) == []


def test_the_workload_is_the_same_in_both_worlds() -> None:
    """Real token ids under the real hash rule are equal exactly where the simulated hashes are."""
    work = conversations(120, pace_s=0.1)
    assert len(work.requests) == 120
    hasher = BlockHasher(fingerprint(BLOCK_TOKENS))
    real = [hasher.chain(hasher.root(), token_ids(request, BLOCK_TOKENS, 1000)) for request in work.requests]
    simulated = [turn.block_hashes[: turn.work.input_tokens // BLOCK_TOKENS] for turn in make_turns(work)]
    assert [len(chain) for chain in real] == [len(chain) for chain in simulated]
    pairs = {
        pair for left, right in zip(real, simulated, strict=True) for pair in zip(left, right, strict=True)
    }
    assert len({one for one, _ in pairs}) == len({other for _, other in pairs}) == len(pairs)
    assert len(pairs) < sum(map(len, real))  # and some are shared


def test_no_answer_is_part_of_a_later_prompt() -> None:
    work = conversations(120, pace_s=0.1)
    prompts = set()
    answers = set()
    for turn in make_turns(work):
        full = turn.work.input_tokens // BLOCK_TOKENS
        prompts.update(turn.block_hashes[:full])
        answers.update(turn.block_hashes[full:])
    assert not prompts & answers
