"""Five ways to answer on one device: our engine over each attention backend, and transformers' own two.

Each draws the same seeded network on the device, in its turn, and gives the memory back at its end.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks import models
from benchmarks.contender import CONTINUOUS, GENERATE, Contender
from benchmarks.gpu import work
from benchmarks.gpu.plan import FLASH, TRITON, UNRECORDED, Plan
from benchmarks.our_engine import Warmpath
from benchmarks.transformers_engines import ContinuousBatching, Generate
from cache.block_hash import BlockHasher
from cache.errors import ConfigError
from cache.fingerprint import Fingerprint, HashAlgorithm
from replica.attention import kv_pages
from replica.attention.backend import check_served
from replica.attention.kv_pages import LayerShape
from replica.config import ReplicaConfig
from replica.memory import human_bytes
from replica.runners.model_runner import ModelRunner

FLASH_BLOCK_SIZE = 256


def why_absent(name: str, plan: Plan, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this contender cannot run here; None = it can."""
    if name == CONTINUOUS and device.type == "cpu" and importlib.util.find_spec("psutil") is None:
        return "needs the package psutil on a CPU: without it transformers finds no memory there"
    if name in (GENERATE, CONTINUOUS):
        return None
    shape = LayerShape(plan.spec.kv_heads, plan.spec.head_dim, plan.spec.head_dim)
    try:
        check_served(backend_of(name), device, dtype, [shape], block_size(name))
    except ConfigError as error:
        return error.accepted
    return None


def why_too_small(plan: Plan, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the plan has no room on this device; None = there is enough for weights, keys and values."""
    needed = work.fewest_bytes(plan.spec, plan.pool_tokens, dtype.itemsize)
    free = kv_pages.free_bytes(device)
    if needed <= free:
        return None
    kept = f"its weights and {plan.pool_tokens:,} tokens' keys and values"
    there = f"{device_name(device)} has {human_bytes(free)} free"
    return f"{plan.spec.name} takes {human_bytes(needed)} for {kept} alone, and {there}"


def backend_of(name: str) -> str:
    """What `attention_backend` is called for one of ours."""
    return TRITON if name == UNRECORDED else name


def block_size(name: str) -> int:
    return FLASH_BLOCK_SIZE if name == FLASH else ReplicaConfig().block_size


@contextmanager
def running(name: str, plan: Plan, device: torch.device, dtype: torch.dtype) -> Iterator[Contender]:
    """The contender, loaded and warm; its memory is free again afterwards."""
    model = models.on_device(plan.spec, device, dtype)
    runner: ModelRunner | None = None
    try:
        contender: Contender
        if name == GENERATE:
            model.set_attn_implementation("sdpa")
            contender = Generate(model)
        elif name == CONTINUOUS:
            contender = ContinuousBatching(model, num_tokens=plan.pool_tokens, step_tokens=plan.step_tokens)
        else:
            config = _config(name, plan)
            runner = ModelRunner.over(model, config, plan.spec.name, max_model_len=plan.spec.max_positions)
            contender = Warmpath(runner, config, BlockHasher(_mark(plan, config, dtype)))
        yield contender
    finally:
        if runner is not None:
            runner.close()
        contender = runner = model = None  # type: ignore[assignment]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _config(name: str, plan: Plan) -> ReplicaConfig:
    size = block_size(name)
    return ReplicaConfig(
        attention_backend=backend_of(name),
        cuda_graphs=name != UNRECORDED,
        block_size=size,
        num_blocks=plan.pool_tokens // size,
        max_batched_tokens=plan.step_tokens,
        greedy_screen="off",
    )


def _mark(plan: Plan, config: ReplicaConfig, dtype: torch.dtype) -> Fingerprint:
    kv_dtype = str(dtype).removeprefix("torch.")
    return Fingerprint(
        plan.spec.name, str(plan.spec.seed), kv_dtype, "", config.block_size, HashAlgorithm.XXH3_128
    )


def device_name(device: torch.device) -> str:
    """What a person calls it, with its memory."""
    if device.type != "cuda":
        return str(device)
    properties: Any = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
