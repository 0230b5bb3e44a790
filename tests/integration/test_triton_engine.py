"""The engine over the Triton kernels, in Triton's interpreter, gives the greedy tokens of gather + SDPA.

Decoder layers are computed by kernels, too, where a family has them of the usual kind.

Cold, from the cache, in chunks. Few and short prompts: a tile of keys costs milliseconds there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cache.errors import ConfigError
from cache.messages import SamplingParams
from replica.config import ReplicaConfig
from replica.layers.card_block import CardBlock
from replica.models.model_loader import load_model
from replica.models.model_source import resolve
from replica.runners import decode_graphs, load_choices
from replica.runners.decode_graphs import Recorder
from replica.runners.model_runner import ModelRunner
from tests import family_engines as engines
from tests import model_families as families
from tests.fakes.recording import KernelRecorder
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


def load(folder: Path, recorder: Recorder | None = None, **settings: Any) -> ModelRunner:
    resolved = resolve(str(folder))
    given: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, **settings}
    given = {"attention_backend": "triton", **given}
    config = ReplicaConfig(model=str(folder), device="cpu", max_running=4, torch_threads=1, **given)
    model = load_model(resolved, torch.device("cpu"), getattr(torch, config.dtype))
    return ModelRunner.over(model, config, "family", max_model_len=256, recorder=recorder)


def num_fused(runner: ModelRunner) -> int:
    return sum(isinstance(module, CardBlock) for module in runner._model.modules())


LLAMA = next(family for family in MORE_FAMILIES if family.name == "llama-plain-rope")
CHUNKED = Setting("chunked", max_batched_tokens=23, num_blocks=64)


def test_greedy_tokens_are_those_of_gather_and_sdpa(tmp_path: Path) -> None:
    check_family(LLAMA, tmp_path, CHUNKED)


@pytest.mark.parametrize(
    "dtype",
    [
        "bfloat16",
        *(pytest.param(each, marks=(pytest.mark.long, pytest.mark.broad)) for each in ("float32", "float16")),
    ],
)
def test_layers_are_kernels_in_every_type_unless_that_is_turned_off(dtype: str, tmp_path: Path) -> None:
    """And the whole network still says what it said as loaded, which is looked at before it serves."""
    families.save(LLAMA, tmp_path)
    for fused_layers, wanted in ((True, 2), (False, 0)):
        runner = load(tmp_path, dtype=dtype, fused_layers=fused_layers)
        assert num_fused(runner) == wanted
        runner.close()


def test_what_auto_is_settles_attention_and_layers_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families.save(LLAMA, tmp_path)
    monkeypatch.setattr(load_choices, "settled", lambda *_: "triton")  # as on a card, in half precision
    runner = load(tmp_path, attention_backend="auto")
    assert (runner.info.attention_backend, num_fused(runner)) == ("triton", 2)
    runner.close()


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.long)])
def test_recorded_decode_steps_say_what_steps_as_they_are_say(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel of a step is launched again as it was: attention's, and those of the layers."""
    from replica.attention import paged_kernels
    from replica.layers import row_kernels

    families.save(next(family for family in families.FAMILIES if family.name == name), tmp_path)
    monkeypatch.setattr(decode_graphs, "SHORTEST", 64)
    recorder = KernelRecorder()
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    answers = []
    for runner in (load(tmp_path, fused_layers=False), load(tmp_path, recorder)):
        if not answers:  # what is launched from here on may be recorded
            recorder.record_all(monkeypatch, paged_kernels, "attend", "merge")
            recorder.record_all(monkeypatch, row_kernels, "norm", "turn", "swish_product")
        engine = engines.engine_over(runner, CHUNKED)
        answers.append(engines.answer_all(engine, FEW[::2], sampling=sampling))  # a long and a short one
        assert num_fused(runner) == (2 if answers[1:] else 0)
    assert runner._graphs is not None
    assert runner._graphs.num_replays > 0, "nothing was replayed"
    assert answers[0] == answers[1]


@pytest.mark.long
@pytest.mark.broad
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
