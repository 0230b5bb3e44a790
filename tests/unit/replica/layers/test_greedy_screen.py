"""The screen on ordinary layers: how few contenders it leaves, and what it hands back."""

from __future__ import annotations

import pytest
import torch

from replica.layers.coarse_product import MakeProduct
from replica.layers.greedy_screen import GreedyScreen, largest_of_chunks, narrowed
from tests.fakes.layers import BFLOAT16, both, drawn, needs_bfloat16


@both
@pytest.mark.parametrize("num_rows", [1, 3, 4, 32])
@pytest.mark.parametrize("vocabulary", [8_000, 8_001, 63])
def test_ordinary_rows_are_decided_among_a_few(
    make_product: MakeProduct, num_rows: int, vocabulary: int
) -> None:
    """A screen that handed everything back would be as exact, and useless."""
    with torch.inference_mode():
        weight, rows = drawn(vocabulary, 256) * 0.02, drawn(num_rows, 256, seed=1)
        found = GreedyScreen(weight, None, make_product).contenders(rows)
        wanted = (rows.double() @ weight.double().T).argmax(dim=-1).tolist()
    assert len(found.counts) == num_rows
    decided = [row for row in range(num_rows) if found.counts[row]]
    assert len(decided) >= 0.9 * num_rows
    assert sum(found.counts) < (8 if make_product is BFLOAT16 else 16) * num_rows
    for row in decided:
        assert wanted[row] in found.tokens[found.rows == row]


@needs_bfloat16
def test_a_weight_that_was_stored_in_bfloat16_leaves_fewer() -> None:
    weight, rows = drawn(8_000, 256) * 0.02, drawn(32, 256, seed=1)
    stored = weight.to(torch.bfloat16)
    assert BFLOAT16 is not None
    with torch.inference_mode():
        usual, fewer, same = (
            GreedyScreen(each, None, BFLOAT16).contenders(rows) for each in (weight, stored, stored.float())
        )
    assert sum(fewer.counts) < sum(usual.counts)
    assert fewer.counts == same.counts


def test_only_what_loses_nothing_is_narrowed() -> None:
    weight = drawn(300, 64)
    assert narrowed(weight) is weight
    for dtype in (torch.bfloat16, torch.float16):
        stored = weight.to(dtype)
        assert narrowed(stored.float()).dtype == dtype
        assert torch.equal(narrowed(stored.float()), stored)
    with_nan = weight.clone()
    with_nan[-1, -1] = torch.nan
    assert narrowed(with_nan) is with_nan


@both
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e28])
def test_rows_that_are_no_numbers_or_huge_are_handed_back(make_product: MakeProduct, bad: float) -> None:
    with torch.inference_mode():
        screen = GreedyScreen(drawn(640, 32) * 1e10, None, make_product)
        rows = drawn(3, 32, seed=1)
        rows[1, 7] = bad
        found = screen.contenders(rows)
        assert found.counts[1] == 0
        assert 0 not in (found.counts[0], found.counts[2])
        assert screen.can_bound(rows).tolist() == [True, False, True]


@pytest.mark.parametrize("shift", [-1e4, -4.0, -2.0, 0.0, 2.0])
def test_the_largest_of_a_chunk_is_found_whatever_its_sign(shift: float) -> None:
    """Chunks without a positive number: none, some, most and all of them."""
    values = (drawn(3 * 50, 8).view(3, 50, 8) + shift).to(torch.bfloat16)
    values[0, 0], values[0, 1], values[0, 2] = 0.0, -0.0, float("-inf")
    values[1, 0, 3], values[1, 1, 3] = float("inf"), 1e-40  # no normal number
    assert torch.equal(largest_of_chunks(values), values.float().amax(dim=-1))


@both
def test_a_row_of_equals_is_handed_back(make_product: MakeProduct) -> None:
    with torch.inference_mode():
        screen = GreedyScreen(drawn(6400, 32), None, make_product)
        found = screen.contenders(torch.stack([torch.zeros(32), drawn(32)]))
    assert found.counts[0] == 0
    assert found.counts[1] > 0


@both
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_weights_that_cannot_be_bounded_are_refused(make_product: MakeProduct, bad: float) -> None:
    weight = drawn(100, 32)
    weight[99, 3] = bad
    with pytest.raises(ValueError, match="too large to be bounded"):
        GreedyScreen(weight, None, make_product)
