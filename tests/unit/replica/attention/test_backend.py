"""Which backend a device gets, and why one that was asked for by name is refused."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cache.errors import ConfigError
from replica.attention import triton_paged
from replica.attention.backend import choose_backend
from replica.attention.kv_pages import LayerShape
from replica.config import BLOCK_SIZES
from tests.triton_interpreter import needs_triton

SHAPES = (LayerShape(2, 64, 64), LayerShape(1, 192, 128))
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("name", ["auto", "gather_sdpa"])
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_every_device_has_one(name: str, device: torch.device) -> None:
    assert choose_backend(name, device, torch.float32, SHAPES).name == "gather_sdpa"


def test_another_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"attention_backend = 'flash'.*auto, gather_sdpa, triton"):
        choose_backend("flash", CPU, torch.float32, SHAPES)


@needs_triton
def test_every_name_that_settings_accept_is_one() -> None:
    for name in BLOCK_SIZES:
        assert choose_backend(name, CPU, torch.float32, SHAPES).name == name


def refused(device: torch.device, dtype: torch.dtype = torch.float32, width: int = 64) -> str:
    with pytest.raises(ConfigError) as caught:
        choose_backend("triton", device, dtype, [*SHAPES, LayerShape(1, width, 64)])
    assert caught.value.field == "attention_backend"
    assert "use auto or gather_sdpa" in caught.value.accepted
    return caught.value.accepted


def test_triton_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "package triton, which is not installed" in refused(CPU)


@needs_triton
class TestTriton:
    """Asked for by name where it cannot serve."""

    def test_on_a_cpu_without_the_interpreter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(triton_paged, "is_interpreted", lambda: False)
        assert "runs on CUDA devices; this one is cpu" in refused(CPU)

    def test_on_a_device_of_another_kind(self) -> None:
        assert "this one is meta" in refused(torch.device("meta"))

    def test_on_a_card_older_than_the_compiler_knows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert "needs compute capability 8.0; cuda:0 has 7.5" in refused(CUDA)

    def test_on_a_card_of_another_maker(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "hip", "7.1")
        assert "AMD" in refused(CUDA)

    def test_on_a_card_while_kernels_are_interpreted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It would work, thousands of times slower than anything else."""
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        assert "TRITON_INTERPRET is set" in refused(CUDA)

    def test_heads_wider_than_its_tiles(self) -> None:
        assert "up to 256 wide; this model has one of 576" in refused(CPU, width=576)

    def test_numbers_it_does_not_compute(self) -> None:
        assert "not float64" in refused(CPU, dtype=torch.float64)


def test_nobody_imports_triton_who_did_not_ask_for_it() -> None:
    program = (
        "import sys, torch\n"
        "import replica.runners.model_runner\n"
        "from replica.attention.backend import choose_backend\n"
        "choose_backend('auto', torch.device('cpu'), torch.float32, [])\n"
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[4])
