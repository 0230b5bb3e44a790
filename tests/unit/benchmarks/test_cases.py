"""Models, plans and prompts."""

from __future__ import annotations

import random

import pytest

from benchmarks.cases import (
    LARGE,
    MODELS,
    SMALL,
    Overhead,
    Pairs,
    Plan,
    Throughput,
    UnknownCells,
    Whole,
    exactly,
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
    plan = full_plan((SMALL, LARGE), Pairs())
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
    for plan in (full_plan((SMALL, LARGE), Pairs()), quick_plan((SMALL,), exactly(2))):
        slots = plan.num_blocks * 16
        cases: list[Throughput | Whole | Overhead] = [*plan.throughput, *plan.whole, *plan.overhead]
        for case in cases:
            assert case.batch * (case.prompt_tokens + case.output_tokens) <= slots
            assert case.prompt_tokens + case.output_tokens <= SMALL.max_positions
        for first in plan.first_token:
            assert first.prompt_tokens * (1 + len(first.hit_ratios)) <= slots


def _pairs(plan: Plan) -> dict[tuple[str, str], int]:
    return {(spec.name, cell.name): plan.num_pairs(spec, cell) for spec in plan.models for cell in plan.cells}


def test_short_cells_get_more_pairs_and_none_fewer_than_an_interval_needs() -> None:
    found = _pairs(full_plan((SMALL, LARGE), Pairs()))
    assert (found["9M", "first-1024"], found["9M", "whole-1x257"]) == (12, 12)
    assert 3 <= found["9M", "whole-4x2048"] < found["9M", "whole-4x1024"] < 12
    assert found["132M", "whole-4x2048"] == 3
    assert found["132M", "caching"] == found["9M", "caching"] // 2
    assert min(found.values()) >= 3


def test_pairs_may_be_given() -> None:
    found = _pairs(quick_plan((SMALL, LARGE), exactly(1)))
    assert {count for (_, cell), count in found.items() if cell != "caching"} == {1}


def test_cells_are_taken_by_name() -> None:
    plan = full_plan((SMALL,), Pairs())
    names = [cell.name for cell in plan.cells]
    assert len(set(names)) == len(names)
    assert [cell.name for cell in plan.only(["caching", "batch-8"]).cells] == ["batch-8", "caching"]
    with pytest.raises(UnknownCells, match="no cell is called batch-7; there are batch-1, batch-8"):
        plan.only(["batch-7"])


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
