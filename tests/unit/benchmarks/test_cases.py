"""Models, plans and prompts."""

from __future__ import annotations

import random

import pytest

from benchmarks.cases import (
    LARGE,
    MODELS,
    SMALL,
    Overhead,
    Throughput,
    Whole,
    full_plan,
    quick_plan,
    random_prompt,
    with_shared_prefix,
)


def test_the_models_are_the_sizes_they_are_named_for() -> None:
    assert round(SMALL.num_parameters / 1e6) == 9
    assert round(LARGE.num_parameters / 1e6) == 132
    assert set(MODELS) == {"9M", "132M"}


def test_the_counted_parameters_are_the_models() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=SMALL.vocabulary,
        hidden_size=SMALL.hidden,
        intermediate_size=SMALL.mlp,
        num_hidden_layers=SMALL.layers,
        num_attention_heads=SMALL.heads,
        num_key_value_heads=SMALL.kv_heads,
        head_dim=SMALL.head_dim,
        tie_word_embeddings=False,
    )
    assert sum(each.numel() for each in Qwen3ForCausalLM(config).parameters()) == SMALL.num_parameters


def test_the_full_plan_has_every_case_that_is_promised() -> None:
    plan = full_plan((SMALL, LARGE), repeats=4)
    assert [case.batch for case in plan.throughput] == [1, 8, 32]
    assert [case.prompt_tokens for case in plan.first_token] == [1024, 4096]
    assert all(case.hit_ratios == (0.5, 0.9) for case in plan.first_token)
    shapes = [(case.batch, case.prompt_tokens, case.output_tokens) for case in plan.whole]
    assert shapes == [
        (1, 257, 64),
        (1, 1024, 32),
        (1, 2048, 16),
        (4, 257, 64),
        (4, 1024, 32),
        (4, 2048, 16),
    ]
    assert plan.overhead


def test_every_case_fits_the_pool_and_the_models() -> None:
    for plan in (full_plan((SMALL, LARGE), 4), quick_plan((SMALL,), 2)):
        slots = plan.num_blocks * 16
        cases: list[Throughput | Whole | Overhead] = [*plan.throughput, *plan.whole, *plan.overhead]
        for case in cases:
            assert case.batch * (case.prompt_tokens + case.output_tokens) <= slots
            assert case.prompt_tokens + case.output_tokens <= SMALL.max_positions
        for first in plan.first_token:
            assert first.prompt_tokens * (1 + len(first.hit_ratios)) <= slots


def test_the_large_model_runs_half_as_often_and_at_least_once() -> None:
    plan = full_plan((SMALL, LARGE), repeats=4)
    assert (plan.repeats(SMALL, 4), plan.repeats(LARGE, 4), plan.repeats(LARGE, 1)) == (4, 2, 1)


def test_prompts_are_the_same_for_the_same_seed_and_hold_no_special_token() -> None:
    first = random_prompt(random.Random(1), 500, 100)
    assert first == random_prompt(random.Random(1), 500, 100)
    assert first != random_prompt(random.Random(2), 500, 100)
    assert min(first) >= 3
    assert max(first) < 100


@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.9])
def test_a_warm_prompt_shares_exactly_its_part(ratio: float) -> None:
    """A vocabulary of few tokens, so that the next one would often be the same by chance."""
    rng = random.Random(0)
    for _ in range(50):
        prompt = random_prompt(rng, 40, 6)
        warm = with_shared_prefix(rng, prompt, ratio, 6)
        shared = int(40 * ratio)
        assert len(warm) == 40
        assert warm[:shared] == prompt[:shared]
        assert warm[shared] != prompt[shared]
