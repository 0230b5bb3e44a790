"""Cuts a whole model down to one rank's part of it, as its plan says.

    colwise                outputs [r*n, (r+1)*n) of each linear; the next one takes them as they are
    rowwise                inputs [r*n, (r+1)*n); a sum over the ranks, then the bias, once
    colwise_gather_output  some of the outputs, gathered: the last rank may have fewer
    rowwise_split_input    takes its inputs out of all of them; then as rowwise

Norms of single heads are whole on every rank: they are applied to the heads that are there. Knows modules and
ranks; knows neither pages nor steps.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from cache.errors import ConfigError
from replica.models.model_probe import Unsupported
from replica.parallel import tp_plan
from replica.parallel.rank_group import Ranks
from replica.parallel.tp_plan import Plan


def shard(model: Any, plan: Plan, ranks: Ranks) -> None:
    """Keep this rank's part of `model`, in place; what is not cut stays as it is, and whole.

    Raises ConfigError where sizes do not divide among the ranks, Unsupported where the plan names what is
    neither a linear layer nor a stack of them.
    """
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, module in list(model.named_modules()):
        style = tp_plan.style_of(plan, name)
        if style is not None and style not in tp_plan.WHOLE:
            is_shared = any(uses[id(parameter)] > 1 for parameter in module.parameters(recurse=False))
            cut = _cut_module(name, module, style, ranks, is_shared=is_shared)
            parent_name, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(parent_name), own_name, cut)
    for name, parameter in list(model.named_parameters()):
        style = tp_plan.style_of(plan, name)
        if style is not None and style not in tp_plan.WHOLE:
            module_name, _, own_name = name.rpartition(".")
            part = _cut_stack(name, parameter, style, ranks)
            setattr(model.get_submodule(module_name), own_name, _parameter(part))


class RowwiseLinear(nn.Module):
    """Some columns of a linear layer: its input is this rank's part, its output everybody's sum."""

    def __init__(self, name: str, linear: nn.Linear, ranks: Ranks, *, splits_input: bool) -> None:
        super().__init__()
        start, stop = _part(name, linear.in_features, ranks)
        self.weight = _parameter(linear.weight[:, start:stop])
        self.bias: nn.Parameter | None = linear.bias  # of the sum: added once it is there
        self._input = slice(start, stop) if splits_input else None
        self._ranks = ranks

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._input is not None:
            hidden = hidden[..., self._input]
        output = self._ranks.sum(functional.linear(hidden, self.weight))
        return output if self.bias is None else output + self.bias


class GatheredLinear(nn.Module):
    """Some rows of a linear layer whose outputs everybody gets: any number, the last part being smaller."""

    def __init__(self, linear: nn.Linear, ranks: Ranks, *, is_shared: bool) -> None:
        """is_shared: its weight is another module's, too, which needs all of it: nothing is cut off then, but
        each rank still computes its own rows alone."""
        super().__init__()
        self.out_features = linear.out_features
        self._width = -(-linear.out_features // ranks.size)
        start = min(ranks.rank * self._width, linear.out_features)
        rows = slice(start, min(start + self._width, linear.out_features))
        self._rows = rows if is_shared else slice(None)
        self.weight = linear.weight if is_shared else _parameter(linear.weight[rows])
        self.bias = None if linear.bias is None else _parameter(linear.bias[rows])
        self._ranks = ranks

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        part = functional.linear(hidden, self.weight[self._rows], self.bias)
        if missing := self._width - part.shape[-1]:
            part = functional.pad(part, (0, missing))
        return self._ranks.gather(part)[..., : self.out_features]


def _cut_module(name: str, module: nn.Module, style: str, ranks: Ranks, *, is_shared: bool) -> nn.Module:
    """is_shared: some of its weights are another module's, too."""
    if style == tp_plan.SUMMED:
        module.register_forward_hook(lambda _module, _given, output: ranks.sum(output))
        return module
    if type(module) is not nn.Linear:
        raise Unsupported(f"transformers' plan cuts {name}, a {type(module).__name__}: only nn.Linear is cut")
    if style == tp_plan.COLWISE_GATHERED:
        return GatheredLinear(module, ranks, is_shared=is_shared)
    if is_shared:
        raise Unsupported(
            f"transformers' plan cuts {name} as {style}, whose weight another layer needs whole"
        )
    if style == tp_plan.COLWISE:
        start, stop = _part(name, module.out_features, ranks)
        module.weight = _parameter(module.weight[start:stop])
        if module.bias is not None:
            module.bias = _parameter(module.bias[start:stop])
        module.out_features = stop - start
        return module
    if style in (tp_plan.ROWWISE, tp_plan.ROWWISE_SPLIT):
        return RowwiseLinear(name, module, ranks, splits_input=style == tp_plan.ROWWISE_SPLIT)
    raise Unsupported(f"transformers' plan cuts the linear layer {name} as {style}")


def _cut_stack(name: str, stack: torch.Tensor, style: str, ranks: Ranks) -> torch.Tensor:
    """A rank's part of (experts, outputs, inputs), or of a vector over what is cut."""
    if style == tp_plan.ROWWISE:
        start, stop = _part(name, stack.shape[-1], ranks)
        return stack[..., start:stop]
    if style == tp_plan.COLWISE:
        axis = max(0, stack.dim() - 2)
        start, stop = _part(name, stack.shape[axis], ranks)
        return stack.narrow(axis, start, stop - start)
    if style == tp_plan.PACKED_COLWISE and stack.dim() >= 2:
        halves = stack.reshape(*stack.shape[:-2], 2, stack.shape[-2] // 2, stack.shape[-1])
        start, stop = _part(name, halves.shape[-2], ranks)
        return halves[..., start:stop, :].flatten(-3, -2)
    raise Unsupported(f"transformers' plan cuts the parameter {name} as {style}")


def _part(name: str, size: int, ranks: Ranks) -> tuple[int, int]:
    """[start, stop) of this rank. Raises ConfigError with both numbers."""
    if size % ranks.size:
        raise ConfigError("tensor_parallel", ranks.size, f"must divide the {size} of the model's {name}")
    width = size // ranks.size
    return ranks.rank * width, (ranks.rank + 1) * width


def _parameter(part: torch.Tensor) -> nn.Parameter:
    """A copy, so that the whole can be let go."""
    return nn.Parameter(part.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)
