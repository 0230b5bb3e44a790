"""Three ways to answer the same prompts, timed alike: our engine, `generate`, and `generate_batch`'s engine.

Each lives in a process of its own (`worker.py`) with its own copy of the model. All are greedy, fp32, one
token budget; the times exclude loading, warming up and allocating a pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contender import CONTINUOUS, GENERATE, OURS, Contender
from benchmarks.our_engine import Warmpath
from benchmarks.transformers_engines import ContinuousBatching, Generate
from cache.block_hash import BlockHasher
from replica.assembly import Assembly, assemble
from replica.config import ReplicaConfig

OUR_BLOCK_SIZE = ReplicaConfig().block_size


@dataclass(frozen=True, slots=True)
class Setup:
    """What every contender is given."""

    folder: Path  # the model's
    threads: int
    num_blocks: int
    max_batched_tokens: int


def load(name: str, setup: Setup) -> Contender:
    if name == OURS:
        return _warmpath(setup)
    if name == GENERATE:
        return Generate(_load_model(setup))
    assert name == CONTINUOUS
    return ContinuousBatching(
        _load_model(setup), num_tokens=setup.num_blocks * OUR_BLOCK_SIZE, step_tokens=setup.max_batched_tokens
    )


def _warmpath(setup: Setup) -> Warmpath:
    config = ReplicaConfig(
        model=str(setup.folder),
        device="cpu",
        dtype="float32",
        torch_threads=setup.threads,
        num_blocks=setup.num_blocks,
        max_batched_tokens=setup.max_batched_tokens,
    )
    assembly: Assembly = assemble(config)
    return Warmpath(assembly.runner, config, BlockHasher(assembly.fingerprint), assembly.decoder)


def _load_model(setup: Setup) -> Any:
    """The same weights as ours, through transformers' ordinary loader."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(setup.threads)
    return AutoModelForCausalLM.from_pretrained(setup.folder, dtype=torch.float32).eval()
