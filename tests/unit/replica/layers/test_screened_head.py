"""An output layer that screens gives the tokens the whole product gives, through whatever a model adds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from replica.layers.coarse_product import find_bfloat16
from replica.layers.packed_linear import PackedLinear, pack_linears
from replica.layers.screen_costs import ProductCost, ScreenCosts
from replica.layers.screened_head import (
    RowsAnswered,
    RowsAsked,
    ScreenedHead,
    keeps_order,
    screen_bytes,
    screen_head,
)

pytestmark = pytest.mark.skipif(find_bfloat16() is None, reason="no bfloat16 product here")

WIDTH, VOCABULARY = 64, 1000


def softcap(logits: torch.Tensor) -> torch.Tensor:
    return torch.tanh(logits / 30.0) * 30.0


def same(logits: torch.Tensor) -> torch.Tensor:
    return logits


def head_of(linear: nn.Linear, costs: ScreenCosts | None = None) -> ScreenedHead:
    holder = nn.Sequential(linear)
    pack_linears(holder)
    whole = holder[0]
    assert isinstance(whole, PackedLinear)
    head = screen_head(linear, whole, torch.randn(40, WIDTH), is_shared=False, measured=False)
    assert head is not None
    head._costs = costs
    return head


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, VOCABULARY)


def answer(
    head: ScreenedHead, rows: torch.Tensor, asked: RowsAsked, after: Callable[[torch.Tensor], torch.Tensor]
) -> RowsAnswered | None:
    with torch.inference_mode():
        return head.answer(asked, lambda: after(head(rows[None]))[0])


@pytest.mark.parametrize(
    "after", [same, softcap, lambda logits: logits * 0.0625], ids=["same", "cap", "scale"]
)
@pytest.mark.parametrize("largest", [tuple(range(12)), (0, 3, 4, 11), (7,), ()])
@pytest.mark.parametrize("others", [(), (1, 2), (9,)])
def test_screened_rows_get_the_first_largest_and_others_all_their_logits(
    linear: nn.Linear,
    after: Callable[[torch.Tensor], torch.Tensor],
    largest: tuple[int, ...],
    others: tuple[int, ...],
) -> None:
    largest = tuple(row for row in largest if row not in others)
    head, rows = head_of(linear), torch.randn(12, WIDTH)
    answered = answer(head, rows, RowsAsked(largest, others), after)
    with torch.inference_mode():
        wanted = after(head.whole(rows[None]))[0]
    assert answered is not None
    assert len(answered.tokens) >= 0.8 * len(largest)
    for row, token in answered.tokens.items():
        assert token == int(wanted[row].argmax())
    assert sorted([*answered.tokens, *answered.computed]) == sorted([*largest, *others])
    torch.testing.assert_close(answered.logits, wanted[list(answered.computed)], rtol=1e-5, atol=1e-5)


def test_without_a_question_it_is_the_packed_layer(linear: nn.Linear) -> None:
    head, rows = head_of(linear), torch.randn(1, 5, WIDTH)
    with torch.inference_mode():
        assert torch.equal(head(rows), head.whole(rows))
    assert (head.in_features, head.out_features) == (WIDTH, VOCABULARY)
    assert head.weight.dtype == torch.float32


def test_the_first_of_equals_is_taken(linear: nn.Linear) -> None:
    rows = torch.randn(4, WIDTH)
    with torch.no_grad():
        for row, places in enumerate([(3, 998), (999, 64), (700, 701, 10), (0, 999)]):
            linear.weight[list(places)] = rows[row] / rows[row].norm() * 3
            linear.bias[list(places)] = 1.0
    answered = answer(head_of(linear), rows, RowsAsked((0, 1, 2, 3), ()), same)
    assert answered is not None
    assert answered.tokens == {0: 3, 1: 64, 2: 10, 3: 0}


def test_rows_that_cannot_be_bounded_are_computed(linear: nn.Linear) -> None:
    """Whoever looks at their logits finds that they are not numbers, drawn from or not."""
    rows = torch.randn(4, WIDTH)
    rows[1, 0] = float("nan")  # unused
    rows[2, 5] = float("inf")
    answered = answer(head_of(linear), rows, RowsAsked((0, 2), ()), same)
    assert answered is not None
    assert list(answered.tokens) == [0]
    assert answered.computed == (1, 2)
    assert bool(answered.logits[0].isnan().all())


def test_a_cap_that_makes_equals_of_logits_is_noticed(linear: nn.Linear) -> None:
    """At 500 and 600 both are 30: the first token is the answer, and it may have been screened out."""
    with torch.no_grad():
        linear.bias.zero_()
        linear.weight[5], linear.weight[900] = 5.0, 6.0
    rows = torch.full((1, WIDTH), 100.0 / WIDTH)
    head = head_of(linear)
    with torch.inference_mode():
        assert int(softcap(head.whole(rows)).argmax()) == 5
    asked = RowsAsked((0,), ())
    assert answer(head, rows, asked, softcap) is None
    uncapped = answer(head, rows, asked, same)
    assert uncapped is not None
    assert uncapped.tokens == {0: 900}


def test_a_forward_that_raises_leaves_the_layer_usable(linear: nn.Linear) -> None:
    head, rows = head_of(linear), torch.randn(2, WIDTH)

    def fail() -> torch.Tensor:
        head(rows[None])
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        head.answer(RowsAsked((0, 1), ()), fail)
    with torch.inference_mode():
        assert head(rows[None]).shape == (1, 2, VOCABULARY)


def test_what_is_handed_back_is_counted(linear: nn.Linear) -> None:
    costs = ScreenCosts(ProductCost(5.0, 0.4), ProductCost(3.0, 0.2))
    head = head_of(linear, costs)
    equals, asked = torch.zeros(8, WIDTH), RowsAsked(tuple(range(8)), ())
    head._screen._bias = None
    with torch.no_grad():
        linear.bias.zero_()
    head = head_of(linear, costs)
    assert head.screens(asked, 8)
    for _ in range(30):
        answered = answer(head, equals, asked, same)
        assert answered is not None
        assert answered.computed == tuple(range(8))
    assert not head.screens(asked, 8)


@pytest.mark.parametrize(
    ("after", "keeps"),
    [
        (same, True),
        (softcap, True),
        (lambda logits: logits * 0.0625, True),
        (lambda logits: -logits, False),
        (lambda logits: logits * 0, False),
        (lambda logits: logits.log_softmax(-1), False),
        (lambda logits: logits[..., :VOCABULARY], False),
        (lambda logits: logits.index_fill(-1, torch.tensor([3]), -1e9), False),
        (lambda logits: logits + torch.linspace(0, 1, VOCABULARY), False),  # one of another length raises
        (lambda logits: logits.abs(), False),
    ],
)
def test_what_a_model_does_to_its_logits_is_seen(
    after: Callable[[torch.Tensor], torch.Tensor], keeps: bool
) -> None:
    assert keeps_order(VOCABULARY, after) is keeps


def test_a_layer_too_small_to_pay_is_left_as_it_is(linear: nn.Linear) -> None:
    holder = nn.Sequential(linear)
    pack_linears(holder)
    whole = holder[0]
    assert isinstance(whole, PackedLinear)
    assert screen_head(linear, whole, torch.randn(40, WIDTH), is_shared=False, measured=True) is None


def test_weights_that_are_no_numbers_are_left_alone(linear: nn.Linear) -> None:
    with torch.no_grad():
        linear.weight[1, 1] = float("nan")
    holder = nn.Sequential(linear)
    pack_linears(holder)
    whole = holder[0]
    assert isinstance(whole, PackedLinear)
    assert screen_head(linear, whole, torch.randn(40, WIDTH), is_shared=False, measured=False) is None


def test_the_memory_it_takes_is_both_products_and_the_rows_if_nobody_else_has_them(
    linear: nn.Linear,
) -> None:
    numbers = WIDTH * VOCABULARY
    assert screen_bytes(linear, is_shared=True) == 3 * numbers
    assert screen_bytes(linear, is_shared=False) == 7 * numbers
