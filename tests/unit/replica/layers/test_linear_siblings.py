"""Layers given the same tensor by the same module are siblings, and nobody else."""

from __future__ import annotations

import torch
from torch import nn

from replica.layers.linear_siblings import find_siblings


class Block(nn.Module):
    """Query, key and value of one tensor, like an attention; the output layer of another."""

    def __init__(self, has_bias: bool = False) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.value = nn.Linear(8, 4, bias=has_bias)
        self.out = nn.Linear(8, 8, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mixed = torch.cat([self.key(rows), self.value(rows)], dim=-1)
        out: torch.Tensor = self.out(self.query(rows) + mixed)
        return out


class Pair(nn.Module):
    """Two modules that are given one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(rows) + self.second(rows)
        return out


def siblings_of(model: nn.Module, *runs: torch.Tensor) -> list[tuple[nn.Linear, ...]]:
    parents = {
        child: parent
        for parent in model.modules()
        for child in parent.children()
        if isinstance(child, nn.Linear)
    }
    return find_siblings(parents, lambda: [model(rows) for rows in runs])


def test_layers_given_the_same_rows_by_one_module_are_siblings() -> None:
    block = Block()
    assert siblings_of(block, torch.randn(2, 8)) == [(block.key, block.value, block.query)]


def test_a_bias_that_the_others_lack_sets_a_layer_apart() -> None:
    block = Block(has_bias=True)
    assert siblings_of(block, torch.randn(2, 8)) == []  # and with it those on either side of it


def test_layers_of_two_modules_are_none() -> None:
    assert siblings_of(Pair(), torch.randn(2, 8)) == []


def test_layers_called_more_than_once_are_none() -> None:
    assert siblings_of(Block(), torch.randn(2, 8), torch.randn(2, 8)) == []


def test_equal_rows_are_not_the_same_rows() -> None:
    class Copying(Block):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.key(rows) + self.value(rows.clone())
            return out

    assert siblings_of(Copying(), torch.randn(2, 8)) == []


def test_the_hooks_are_gone_even_after_a_forward_that_raises() -> None:
    block = Block()
    try:
        siblings_of(block, torch.randn(2, 7))
    except RuntimeError:
        pass
    else:
        raise AssertionError("7 columns do not fit")
    assert not any(module._forward_pre_hooks for module in block.modules())
