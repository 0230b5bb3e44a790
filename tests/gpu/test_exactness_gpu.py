"""The exactness cases of `integration/test_exactness.py` on CUDA, in float32 without TF32: over torch's own
attention, and over Triton's kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replica.attention import triton_paged
from replica.attention.kv_pages import LayerShape
from tests import family_engines as engines
from tests import model_families as families
from tests.family_engines import SETTINGS, Runners, Setting
from tests.model_families import FAMILIES, MORE_FAMILIES, Family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
CUDA = torch.device("cuda", 0)


def _why_no_kernels() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device here"
    return triton_paged.why_not(CUDA, torch.float32, [LayerShape(2, 64, 64)])


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES], ids=lambda family: family.name)
def test_greedy_output_is_generates_on_cuda(family: Family, tmp_path: Path) -> None:
    folder = families.save(family, tmp_path)
    wanted = families.expected(folder, CUDA)
    engines.check_variety(wanted)
    runners = Runners(folder, "cuda")
    try:
        for setting in SETTINGS:
            engines.check_family(runners, setting, wanted)
        engines.check_conversation(runners, Setting("conversation", block_size=4))
    finally:
        runners.close()


@pytest.mark.skipif(_why_no_kernels() is not None, reason=str(_why_no_kernels()))
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_greedy_output_is_generates_over_the_kernels(family: Family, tmp_path: Path) -> None:
    """The whole engine: cold, warm, chunked, preempted, its decode steps recorded."""
    folder = families.save(family, tmp_path)
    wanted = families.expected(folder, CUDA)
    engines.check_variety(wanted)
    runners = Runners(folder, "cuda", "triton")
    try:
        for setting in SETTINGS:
            engines.check_family(runners, setting, wanted)
    finally:
        runners.close()
