"""One model on two cards over NCCL: what one card says."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replica.config import ReplicaConfig
from replica.models.model_source import resolve
from replica.runners.model_runner import ModelRunner
from replica.runners.parallel_runner import ParallelRunner
from tests.family_engines import Setting, answer_all, engine_over
from tests.model_families import FAMILIES, Family, prompts, save

NUM_CARDS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_CARDS < 2, reason=f"needs two CUDA devices; torch sees {NUM_CARDS}"),
]

CHUNKED = Setting("chunked", block_size=4, max_batched_tokens=23)  # with prefix hits and mixed steps
CUT = [family for family in FAMILIES if family.name in ("llama", "qwen3")]


@pytest.mark.parametrize("family", CUT, ids=lambda family: family.name)
def test_two_cards_say_what_one_says(family: Family, tmp_path: Path) -> None:
    """In float32, where a sum in another order tips no token of these networks."""
    folder = save(family, tmp_path)
    config = ReplicaConfig(
        model=str(folder),
        device="cuda",
        dtype="float32",
        block_size=CHUNKED.block_size,
        num_blocks=CHUNKED.num_blocks,
    )
    whole = ModelRunner.load(config, resolve(str(folder)))
    try:
        expected = answer_all(engine_over(whole, CHUNKED), prompts(), at_once=3)
    finally:
        whole.close()
    lost = threading.Event()
    runner = ParallelRunner.load(replace(config, tensor_parallel=2), resolve(str(folder)), on_lost=lost.set)
    try:
        assert runner.info.num_ranks == 2
        assert runner.info.kv_bytes_per_block == whole.info.kv_bytes_per_block // 2, "its own heads alone"
        assert answer_all(engine_over(runner, CHUNKED), prompts(), at_once=3) == expected
    finally:
        runner.close()
    assert not lost.is_set()
