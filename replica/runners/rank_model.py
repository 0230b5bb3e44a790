"""One rank's part of a model: whether there is room for it, loaded, cut, on its device, its layers probed.

The same steps in the same order on every rank, since each forward waits for all of them. Knows models, plans
and memory; knows neither processes nor pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from replica.attention import kv_pages
from replica.attention.kv_pages import LayerShape
from replica.memory import free_host_bytes
from replica.models import model_probe
from replica.models.model_loader import load_model
from replica.models.model_source import ModelRefused, NotEnoughMemory, ResolvedModel, stored_dtype
from replica.models.weight_files import weight_bytes
from replica.parallel import sharding, tp_plan
from replica.parallel.rank_group import Ranks


class _Alone:
    """`Ranks` of which nobody else is there: sizes are checked with it, nothing is computed."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor] * self.size, dim=-1)


def check(resolved: ResolvedModel, model_config: Any, dtype: torch.dtype, num_ranks: int) -> int:
    """Whether the model can be cut so, found out without its weights. Bytes of rank 0's part, the largest.

    Raises ModelRefused for what no plan serves, ConfigError for numbers that do not divide.
    """
    try:
        model = model_probe.without_weights(model_config, dtype)
        plan = tp_plan.plan_of(model)
        tp_plan.check_heads(model_config, plan, num_ranks)
        sharding.shard(model, plan, _Alone(0, num_ranks))
    except model_probe.Unsupported as error:
        raise ModelRefused(resolved.source, f"cannot be served by {num_ranks} ranks: {error}") from error
    return sum(each.numel() * each.element_size() for each in model.parameters())


def check_memory(
    resolved: ResolvedModel, part_bytes: int, device: torch.device, dtype: torch.dtype, num_ranks: int
) -> None:
    """Before loading: rank 0's part must fit on its card, or all parts on the host, and the whole there.

    A checkpoint stored as it is served is mapped from its files, and read only where it is cut; one that is
    converted is in host memory for a while, whole, once for each rank. Raises NotEnoughMemory.
    """
    name = str(dtype).removeprefix("torch.")
    if stored_dtype(resolved) != name:
        needed, free = num_ranks * weight_bytes(resolved, name), free_host_bytes()
        if needed > free:
            purpose = f"its weights as {name}, once for each of {num_ranks} ranks while it is cut"
            raise NotEnoughMemory(resolved.source, needed, free, "the host", purpose)
    check_device(resolved, part_bytes * (num_ranks if device.type == "cpu" else 1), device, num_ranks)


def check_device(resolved: ResolvedModel, needed: int, device: torch.device, num_ranks: int) -> None:
    """Raises NotEnoughMemory where a device has no room for so many bytes of weights.

    Each rank asks of its own card: who asks of another's takes memory there.
    """
    free = kv_pages.free_bytes(device)
    if needed > free:
        purpose = f"its weights, cut into {num_ranks} parts"
        raise NotEnoughMemory(resolved.source, needed, free, str(device), purpose)


def load_whole(resolved: ResolvedModel, dtype: torch.dtype) -> Any:
    """The model on the CPU, whichever device serves its parts. Raises ModelRefused."""
    return load_model(resolved, torch.device("cpu"), dtype)


def cut(
    model: Any, source: str, ranks: Ranks, device: torch.device, max_model_len: int
) -> Sequence[tuple[nn.Module, LayerShape]]:
    """Keep this rank's part, move it to its device, and run it once with the others: its attention layers.

    Raises ModelRefused.
    """
    try:
        sharding.shard(model, tp_plan.plan_of(model), ranks)
        model.to(device)
        layers = model_probe.probe_layers(model)
        model_probe.check_windows(model.config, layers, max_model_len)
        return layers
    except model_probe.Unsupported as error:
        raise ModelRefused(source, f"cannot be served by {ranks.size} ranks: {error}") from error
