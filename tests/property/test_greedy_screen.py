"""A screen never loses the largest logit, however the weights are made to fool it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.layers import greedy_screen
from replica.layers.coarse_product import MakeProduct, find_bfloat16, find_int8
from replica.layers.greedy_screen import Contenders, GreedyScreen

PRODUCTS = {"bfloat16": find_bfloat16(), "int8": find_int8()}


@pytest.fixture(scope="module", params=list(PRODUCTS))
def make_product(request: pytest.FixtureRequest) -> MakeProduct:
    make = PRODUCTS[request.param]
    if make is None:
        pytest.skip(f"no {request.param} product here")
    return make


@st.composite
def layers(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """A weight, a bias or none, and rows: ordinary ones and such as were made to mislead."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 31)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tokens, width = draw(st.integers(1, 400)), draw(st.sampled_from([1, 2, 7, 64, 96, 257]))
    scale = draw(st.sampled_from([1e-38, 1e-30, 1e-18, 1e-3, 1.0, 300.0, 1e12]))
    weight = normal(tokens, width) * scale
    rows = normal(draw(st.integers(1, 9)), width) * draw(
        st.sampled_from([1e-38, 1e-18, 1e-4, 1.0, 1e3, 1e15])
    )
    for trick in draw(st.lists(st.sampled_from(TRICKS), max_size=4)):
        trick(weight, rows, generator)
    bias = normal(tokens) * scale * draw(st.sampled_from([0.0, 1.0, 100.0])) if draw(st.booleans()) else None
    return weight, bias, rows


def _twins(weight: torch.Tensor, _rows: torch.Tensor, generator: torch.Generator) -> None:
    """Tokens with the very same weights, far apart and side by side."""
    tokens = weight.shape[0]
    source, *others = torch.randint(tokens, (6,), generator=generator).tolist()
    weight[others] = weight[source].clone()


def _near_twins(weight: torch.Tensor, _rows: torch.Tensor, generator: torch.Generator) -> None:
    """One token a little larger than another, by less than bfloat16 can tell."""
    first, second = torch.randint(weight.shape[0], (2,), generator=generator).tolist()
    weight[second] = weight[first] * (1 + 2.0**-12)


def _aligned(weight: torch.Tensor, rows: torch.Tensor, generator: torch.Generator) -> None:
    """Weights along a row, all rounded the same way: errors add up instead of cancelling."""
    which = torch.randint(weight.shape[0], (3,), generator=generator)
    for index, token in enumerate(which.tolist()):
        signs = rows[0].sign() * (1 + 2.0**-8 + (index - 1) * 2.0**-10)
        weight[token] = signs * weight[token].abs().mean()


def _cancelling(weight: torch.Tensor, rows: torch.Tensor, _generator: torch.Generator) -> None:
    """Large products that cancel, so that a small rest decides."""
    half = weight.shape[1] // 2
    weight[:, half : 2 * half] = -weight[:, :half] * (1 + 2.0**-10)
    rows[:, half : 2 * half] = rows[:, :half]


def _zeros(weight: torch.Tensor, rows: torch.Tensor, generator: torch.Generator) -> None:
    weight[torch.randint(weight.shape[0], (1,), generator=generator)] = 0.0
    rows[torch.randint(rows.shape[0], (1,), generator=generator)] = 0.0


def _outlier(weight: torch.Tensor, rows: torch.Tensor, generator: torch.Generator) -> None:
    """One coordinate dwarfs the others, as in trained networks."""
    place = int(torch.randint(weight.shape[1], (1,), generator=generator))
    rows[:, place] *= 1000
    weight[::2, place] *= 50


def _all_below_zero(weight: torch.Tensor, rows: torch.Tensor, _generator: torch.Generator) -> None:
    weight.abs_()
    rows.abs_().neg_()


def _stored_in_bfloat16(weight: torch.Tensor, _rows: torch.Tensor, _generator: torch.Generator) -> None:
    weight.copy_(weight.to(torch.bfloat16))


def _not_numbers(_weight: torch.Tensor, rows: torch.Tensor, generator: torch.Generator) -> None:
    bad = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, 2e19])
    row, place = (int(torch.randint(size, (1,), generator=generator)) for size in rows.shape)
    rows[row, place] = bad[int(torch.randint(len(bad), (1,), generator=generator))]


TRICKS = [
    _twins,
    _near_twins,
    _aligned,
    _cancelling,
    _zeros,
    _outlier,
    _all_below_zero,
    _stored_in_bfloat16,
    _not_numbers,
]


@settings(max_examples=150)
@given(layer=layers())
def test_the_largest_logit_is_always_among_the_contenders(
    make_product: MakeProduct, layer: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
) -> None:
    """Exact or from a float32 product; and what is left out is below the limit, in either."""
    weight, bias, rows = layer
    with torch.inference_mode():
        screen = _screen(weight, bias, make_product)
        if screen is None:
            return
        found = screen.contenders(rows)
        exact = rows.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        rounded = torch.nn.functional.linear(rows, weight, bias)
        answers = screen.exact(rows, found)
    assert found.rows.tolist() == sorted(found.rows.tolist())
    for row in range(rows.shape[0]):
        mine = found.rows == row
        tokens = found.tokens[mine].tolist()
        assert len(tokens) == found.counts[row]
        if not tokens:
            continue  # handed back
        assert tokens == sorted(set(tokens))
        for logits in (exact[row], rounded[row].double()):
            assert not logits.isnan().any()
            left_out = torch.ones(logits.shape, dtype=torch.bool)
            left_out[tokens] = False
            assert set((logits == logits.max()).nonzero().flatten().tolist()) <= set(tokens)
            assert bool((logits[left_out] < found.limits[row]).all())
        terms = rows[row].double().abs() @ weight[tokens].double().abs().T
        error = (answers[mine].double() - exact[row, tokens]).abs()
        assert bool((error <= 2.0**-24 * exact[row, tokens].abs() + 1e-12 * terms + 2.0**-126).all())


@settings(max_examples=40)
@given(layer=layers())
def test_tokens_with_the_same_weights_get_the_same_bits(
    make_product: MakeProduct, layer: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
) -> None:
    """The first of equals is the answer, so equals must come out equal wherever they stand."""
    weight, _, rows = layer
    twins = torch.cat([weight, weight.flip(0)])
    tokens = twins.shape[0]
    with torch.inference_mode():
        screen = _screen(twins, None, make_product)
        if screen is None:
            return
        everything = Contenders(
            torch.arange(rows.shape[0]).repeat_interleave(tokens),
            torch.arange(tokens).repeat(rows.shape[0]),
            torch.zeros(rows.shape[0]),
            [tokens] * rows.shape[0],
        )
        logits = screen.exact(rows, everything).view(rows.shape[0], tokens)
    torch.testing.assert_close(logits, logits.flip(1), rtol=0, atol=0, equal_nan=True)


def _screen(
    weight: torch.Tensor, bias: torch.Tensor | None, make_product: MakeProduct
) -> GreedyScreen | None:
    is_large = float(weight.abs().max()) > greedy_screen._LARGEST_PRODUCT / weight.shape[1]
    is_unsuited = bias is not None and make_product is PRODUCTS["int8"]
    try:
        return GreedyScreen(weight, bias, make_product)
    except ValueError:
        if is_large or is_unsuited:
            return None
        raise
