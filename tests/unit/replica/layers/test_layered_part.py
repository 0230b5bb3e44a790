"""A part's rows on their way through layers that each leave a mark on what they see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from replica.layers.layered_part import LayeredPart
from replica.scheduling.layer_span import LayerSpan
from replica.scheduling.runner import ScheduledSequence
from tests.fakes.steps import scheduled

NUM_LAYERS, NUM_DECODES, NUM_NEW = 4, 2, 3


class Layer(nn.Module):
    """Adds its number's power of ten, and what it is told of each row's position."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.step = 10.0**number
        self.saw: list[int] = []  # rows of each call

    def forward(
        self, hidden_states: torch.Tensor, *, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        cosines, sines = position_embeddings
        assert cosines.shape[1] == sines.shape[1] == hidden_states.shape[1]
        self.saw.append(hidden_states.shape[1])
        return hidden_states + self.step


class Model(nn.Module):
    """Hands its rows from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.has_memory = True
        self.layers = nn.ModuleList([Layer(number) for number in range(NUM_LAYERS)])

    def forward(self, rows: torch.Tensor, *, by_keyword: bool = False) -> torch.Tensor:
        angles = torch.zeros(1, rows.shape[1], 2)
        for layer in self.layers:
            told: dict[str, Any] = {"position_embeddings": (angles, angles)}
            rows = layer(hidden_states=rows, **told) if by_keyword else layer(rows, **told)
        if not self.has_memory:
            raise MemoryError
        return rows


def part(first: int, end: int, *, name: str = "part", start: int = 8) -> ScheduledSequence:
    sequence = scheduled(name, [0, 1, 2, 3], start, NUM_NEW, 40)
    return replace(sequence, layers=LayerSpan(first, end, NUM_LAYERS))


def embedded() -> torch.Tensor:
    return torch.zeros(1, NUM_DECODES + NUM_NEW, 2)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def layered(model: Model) -> LayeredPart:
    return LayeredPart(list(model.layers))


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("ends", [(1, 2, 3, 4), (2, 4), (1, 4), (3, 4)])
def test_a_part_has_been_through_each_layer_once(
    model: Model, layered: LayeredPart, ends: tuple[int, ...], by_keyword: bool
) -> None:
    """And decodes through all of them, in every step."""
    for first, end in zip((0, *ends), ends, strict=False):
        with layered.sent(part(first, end), NUM_DECODES):
            rows = model(embedded(), by_keyword=by_keyword)
        saw = [layer.saw[-1] for layer in model.layers]
        whole = NUM_DECODES + NUM_NEW
        assert saw == [whole if first <= number < end else NUM_DECODES for number in range(NUM_LAYERS)]
        assert (rows[:, :NUM_DECODES] == 1111.0).all()
    assert rows.shape[1] == NUM_DECODES + NUM_NEW
    assert (rows == 1111.0).all()


def test_forwards_of_one_step_are_of_the_same_rows(model: Model, layered: LayeredPart) -> None:
    for first, end in ((0, 3), (3, 4)):
        with layered.sent(part(first, end), NUM_DECODES):
            assert torch.equal(model(embedded()), rows := model(embedded()))
    assert (rows == 1111.0).all()


def test_a_step_that_fails_is_as_if_it_had_not_been(model: Model, layered: LayeredPart) -> None:
    with layered.sent(part(0, 2), NUM_DECODES):
        model(embedded())
    model.has_memory = False
    with pytest.raises(MemoryError), layered.sent(part(2, 3), NUM_DECODES):
        model(embedded())
    model.has_memory = True
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)
    with layered.sent(part(2, 4), NUM_DECODES):
        rows = model(embedded())
    assert (rows == 1111.0).all()


@pytest.mark.parametrize(
    "wrong",
    [part(1, 3), part(3, 4), part(2, 4, name="other"), part(2, 4, start=11)],
    ids=["again", "too far", "another's", "another part"],
)
def test_a_part_goes_on_where_it_was(model: Model, layered: LayeredPart, wrong: ScheduledSequence) -> None:
    with layered.sent(part(0, 2), NUM_DECODES):
        model(embedded())
    with pytest.raises(RuntimeError, match="has not been through the layers before"):
        with layered.sent(wrong, NUM_DECODES):
            pass


def test_a_part_may_be_begun_anew(model: Model, layered: LayeredPart) -> None:
    for first, end in ((0, 2), (0, 3), (3, 4)):
        with layered.sent(part(first, end), NUM_DECODES):
            rows = model(embedded())
    assert (rows == 1111.0).all()
    with pytest.raises(RuntimeError), layered.sent(part(3, 4), NUM_DECODES):
        pass
