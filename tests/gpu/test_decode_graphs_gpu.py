"""CUDA graphs of decode steps on a card: recorded, replayed, and nothing is said that is not said without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cache.messages import SamplingParams
from replica.attention import triton_paged
from replica.attention.kv_pages import LayerShape
from replica.config import ReplicaConfig
from replica.models.model_source import resolve
from replica.runners.model_runner import ModelRunner
from tests import family_engines as engines
from tests import model_families as families
from tests.family_engines import Setting
from tests.model_families import FAMILIES, Family


def _why_skipped() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device here"
    return triton_paged.why_not(torch.device("cuda", 0), torch.float32, [LayerShape(2, 64, 64)])


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_why_skipped() is not None, reason=str(_why_skipped()))]

SETTING = Setting("graphs", max_running=12)
# Dense layers, windows, caps, sinks. Experts are chosen on the way, which may not be recordable: not here.
RECORDABLE = [family for family in FAMILIES if family.name in ("llama", "qwen3", "mistral", "gemma2", "phi3")]


@pytest.mark.parametrize("family", RECORDABLE, ids=lambda family: family.name)
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_replayed_steps_answer_the_same(family: Family, heat: float, tmp_path: Path) -> None:
    folder = families.save(family, tmp_path)
    config = ReplicaConfig(
        model=str(folder), device="cuda", dtype="float32", attention_backend="triton", num_blocks=1024
    )
    sampling = SamplingParams(max_tokens=16, temperature=heat, ignore_eos=True)
    answers = []
    for is_recorded in (False, True):
        runner = ModelRunner.load(replace(config, cuda_graphs=is_recorded), resolve(str(folder)))
        try:
            engine = engines.engine_over(runner, SETTING)
            answers.append(engines.answer_all(engine, families.prompts(), sampling=sampling, at_once=4))
            assert (runner._graphs is not None) == is_recorded
            if runner._graphs is not None:
                assert runner._graphs.num_replays > 0, "nothing was replayed"
        finally:
            runner.close()
    assert answers[0] == answers[1]
