"""What building an engine imports, and what it takes from settings and tokenizer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import replica.assembly
from cache.errors import StructureRefused
from cache.structure import Structure, StructureKind
from replica.assembly import assemble
from replica.config import ReplicaConfig, SimConfig
from replica.models.model_source import resolve
from replica.scheduling.runner import Runner
from replica.structures.vocabulary import TokenizerUnsuited


def test_everything_but_the_model_imports_without_torch_and_ray() -> None:
    """The cluster simulation and the demo drive these on machines and in CI jobs without them."""
    program = (
        "import sys\n"
        "import replica.assembly, replica.ask, replica.engine.engine, replica.publisher\n"
        "import replica.runners.sim_runner\n"
        "print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.fixture
def model_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMPATH_CACHE", str(tmp_path))


def test_simulated_engine_speaks_the_models_tokens(model_cache: None) -> None:
    """Prompts are tokenized with the model's tokenizer: every id of it must be taken."""
    config = ReplicaConfig(
        runner="simulated", num_blocks=9, max_model_len=77, sim=SimConfig(vocab_size=3, num_blocks=5)
    )
    assembly = assemble(config)
    runner: Runner = assembly.runner
    assert (runner.info.num_blocks, runner.info.max_model_len) == (9, 77)
    assert runner.info.vocab_size == len(assembly.tokenizer)
    assert assembly.fingerprint.kv_dtype == "simulated"
    assert assembly.core().max_model_len == 77


def test_what_is_wrong_with_a_tokenizer_is_told_to_who_asks_for_structured_output(
    model_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it was, the answer said that the tokenizer does not tell what its tokens stand for."""

    def unsuited(*_args: object, **_settings: object) -> None:
        raise TokenizerUnsuited("token 3 decodes otherwise than its bytes say")

    monkeypatch.setattr(replica.assembly, "StructureVocabulary", unsuited)
    structures = assemble(ReplicaConfig(runner="simulated")).structures
    with pytest.raises(StructureRefused, match=r"structured output: token 3 decodes otherwise"):
        structures.begin(Structure(StructureKind.REGEX, "a"))


def test_the_tokenizers_end_is_one_of_the_engines(model_cache: None, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve("tiny").folder, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    config = ReplicaConfig(model=str(folder), device="cpu", num_blocks=64, fused_layers=False)
    assembly = assemble(config)
    try:
        assert assembly.runner.info.eos_token_ids == {0, assembly.tokenizer.eos_token_id}
        assert assembly.tokenizer.eos_token_id != 0
    finally:
        assembly.runner.close()
