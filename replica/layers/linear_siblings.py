"""Which linear layers of a model are given the same rows, as query, key and value or gate and up are.

Found by watching one forward rather than by name: families name them differently, and some feed layers
that look alike with different rows. Knows torch modules; knows nothing of what is done with the answer.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import nn


def find_siblings(
    parents: Mapping[nn.Linear, nn.Module], run: Callable[[], object]
) -> list[tuple[nn.Linear, ...]]:
    """Groups of at least two layers that one module hands the very same tensor, one after the other.

    parents: the layers in question, each with the only module that has it. run: one forward of the model.
    A layer that the forward calls more than once has no siblings: it may be given other rows each time.
    """
    calls: list[tuple[nn.Linear, torch.Tensor]] = []  # tensors are held, so that none takes another's id

    def note(linear: nn.Module, rows: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(linear, nn.Linear)
        calls.append((linear, rows[0]))

    hooks = [linear.register_forward_pre_hook(note) for linear in parents]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    times = Counter(linear for linear, _ in calls)
    groups = (
        tuple(linear for linear, _ in group)
        for _, group in itertools.groupby(
            calls, key=lambda call: (id(call[1]), id(parents[call[0]]), call[0].bias is None)
        )
    )
    return [group for group in groups if len(group) > 1 and all(times[linear] == 1 for linear in group)]
