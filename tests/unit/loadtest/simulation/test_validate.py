"""What the comparison with real replicas stands on: its workload, its fit, its verdict."""

from __future__ import annotations

import numpy as np
import pytest

from cache.block_hash import BlockHasher
from cache.events import StepTimeModel
from loadtest.simulation.real_fleet import token_ids
from loadtest.simulation.real_replica import Step
from loadtest.simulation.turns import fingerprint, make_turns
from loadtest.simulation.validate import (
    BLOCK_TOKENS,
    CONFIG,
    FORMS,
    Comparison,
    changed_places,
    conversations,
    fit,
)
from replica.config import ReplicaConfig
from replica.scheduling.step_time import StepWork
from router.config import RouterConfig


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


def apart(mean_s: float) -> tuple[list[float], list[float]]:
    """Two policies' times of a hundred requests. The interval of one less the other is mean_s ± 0.197."""
    one = [2.0 + mean_s + (1.0 if number % 2 else -1.0) for number in range(100)]
    return one, [2.0] * 100


@pytest.mark.parametrize(
    ("real_s", "simulated_s", "is_told"),
    [
        (-0.20, 0.20, True),  # each is sure, and they contradict each other
        (-0.20, 0.01, True),  # reality is sure, and the simulation's mean says otherwise, sure or not
        (-0.45, 0.00, True),  # ... or makes nothing of it
        (-0.20, -0.01, False),  # the same order, however little is left of the difference
        (-0.20, -9.00, False),
        (-0.19, 9.00, False),  # reality is not sure: [-0.387, 0.007]
        (0.00, 9.00, False),
    ],
)
def test_an_order_that_reality_is_sure_of_is_the_simulations_too(
    real_s: float, simulated_s: float, is_told: bool
) -> None:
    """A swap was told only where the simulation was as sure of the opposite."""
    real, simulated = apart(real_s), apart(simulated_s)
    pair = [comparison("a", real[0], simulated[0]), comparison("b", real[1], simulated[1])]
    assert changed_places(pair) == changed_places(pair[::-1]) == ([("a", "b")] if is_told else [])


def test_orders_of_several_are_judged_pair_by_pair() -> None:
    """Real: a before b before c, by half a second each. Simulated: c has come to the front."""
    at = [
        list(np.full(100, mean_s) + 0.1 * np.random.default_rng(0).random(100)) for mean_s in (1.0, 1.5, 2.0)
    ]
    three = [comparison("a", at[0], at[1]), comparison("b", at[1], at[2]), comparison("c", at[2], at[0])]
    assert changed_places(three) == [("a", "c"), ("b", "c")]


def test_what_ships_is_among_what_is_validated() -> None:
    """By the defaults of Router and engine: late binding had never been held against real replicas."""
    config = RouterConfig(model_name="any", tokenizer="any", fingerprint=fingerprint(BLOCK_TOKENS))
    shipped = [form for form in FORMS if (form.policy, form.binding) == (config.policy, config.binding)]
    assert [form.label for form in shipped] == ["expected_time+late"]
    assert CONFIG.scheduling_order == ReplicaConfig(model="any").scheduling_order


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
