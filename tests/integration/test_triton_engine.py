"""The engine over the Triton kernels, in Triton's interpreter, gives the greedy tokens of gather + SDPA.

Cold, from the cache, in chunks. Few and short prompts: a tile of keys costs milliseconds there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cache.errors import ConfigError
from cache.messages import SamplingParams
from replica.config import ReplicaConfig
from replica.models.model_source import resolve
from replica.runners.model_runner import ModelRunner
from tests import family_engines as engines
from tests import model_families as families
from tests.family_engines import Runners, Setting
from tests.model_families import MORE_FAMILIES, Family
from tests.triton_interpreter import needs_triton

pytestmark = needs_triton

PROMPTS = families.prompts()
# A prefix of three blocks, the same with 9 more tokens, a stranger.
FEW = (PROMPTS[4], PROMPTS[0], PROMPTS[11])
CACHED = (0, 48, 0)
SAMPLING = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def answers(runners: Runners, setting: Setting) -> dict[str, list[engines.Answer]]:
    engine = runners.engine(setting)
    return {
        "cold": engines.answer_all(engine, FEW, sampling=SAMPLING),
        "warm": engines.answer_all(engine, FEW[:2], sampling=SAMPLING),
    }


def check_family(family: Family, folder: Path, setting: Setting) -> None:
    """Tokens and hits are those over gather + SDPA, which `test_exactness.py` holds against `generate`."""
    families.save(family, folder)
    runners, reference = Runners(folder, "cpu", "triton"), Runners(folder, "cpu", "gather_sdpa")
    try:
        got, wanted = answers(runners, setting), answers(reference, setting)
        assert runners.get(setting.block_size, setting.num_blocks).info.attention_backend == "triton"
        assert got == wanted
        assert tuple(answer.cached_tokens for answer in got["cold"]) == CACHED
        assert [answer.cached_tokens for answer in got["warm"]] == [32, 48]
        assert len({answer.token_ids for answer in got["cold"]}) > 2, "it does not look at its prompt"
    finally:
        runners.close()
        reference.close()


LLAMA = next(family for family in MORE_FAMILIES if family.name == "llama-plain-rope")
CHUNKED = Setting("chunked", max_batched_tokens=23, num_blocks=64)


def test_greedy_tokens_are_those_of_gather_and_sdpa(tmp_path: Path) -> None:
    check_family(LLAMA, tmp_path, CHUNKED)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "deepseek_v3", "mistral"])
def test_windows_caps_sinks_and_latent_heads(name: str, tmp_path: Path) -> None:
    check_family(next(family for family in families.FAMILIES if family.name == name), tmp_path, CHUNKED)


def test_a_backend_that_cannot_serve_the_device_refuses_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families.save(LLAMA, tmp_path)
    monkeypatch.setattr("replica.attention.triton_paged.is_interpreted", lambda: False)
    config = ReplicaConfig(model=str(tmp_path), device="cpu", num_blocks=8, attention_backend="triton")
    with pytest.raises(ConfigError, match="attention_backend = 'triton': runs on CUDA devices"):
        ModelRunner.load(config, resolve(str(tmp_path)))
