"""Which backend a device gets, and why one that was asked for by name is refused."""

from __future__ import annotations

import importlib.util
import logging
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cache.errors import ConfigError
from replica.attention import backend, flash_paged, triton_paged
from replica.attention.backend import choose_backend
from replica.attention.flash_paged import FlashFunctions
from replica.attention.kv_pages import LayerShape
from replica.config import BLOCK_SIZES
from tests.fakes.flash_attention import FLASH
from tests.triton_interpreter import needs_triton

SHAPES = (LayerShape(2, 64, 64), LayerShape(1, 192, 128))
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def beside_a_card(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """As if it were installed beside a card of compute capability 9.0."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == package else find(name))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.fixture
def flash_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    beside_a_card(monkeypatch, "flash_attn")
    monkeypatch.setattr(flash_paged, "_functions", lambda: FLASH)


@pytest.mark.parametrize("name", ["auto", "gather_sdpa"])
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_every_device_has_one(name: str, device: torch.device) -> None:
    assert choose_backend(name, device, torch.float32, SHAPES, 16).name == "gather_sdpa"


HALF = torch.bfloat16


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton compiles its kernels and starts them."""
    beside_a_card(monkeypatch, "triton")
    monkeypatch.setattr(triton_paged, "is_interpreted", lambda: False)
    monkeypatch.setattr(triton_paged, "_why_nothing_starts", lambda _device: None)


@pytest.mark.parametrize(
    ("device", "dtype", "width", "settled"),
    [
        (CUDA, torch.bfloat16, 128, "triton"),
        (CUDA, torch.float16, 256, "triton"),
        (CUDA, torch.bfloat16, 257, "gather_sdpa"),  # wider than its tiles
        (CUDA, torch.float32, 128, "gather_sdpa"),
        (CPU, torch.bfloat16, 128, "gather_sdpa"),
    ],
)
def test_auto_is_triton_where_it_was_measured_and_can_serve(
    card: None, device: torch.device, dtype: torch.dtype, width: int, settled: str
) -> None:
    assert backend.settled("auto", device, dtype, [LayerShape(2, 64, width)]) == settled


def test_auto_is_torchs_own_on_a_card_that_triton_does_not_serve_and_says_why(
    card: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose_backend("auto", CUDA, HALF, SHAPES, 16).name == "gather_sdpa"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.triton == "needs compute capability 8.0; cuda:0 has 7.5"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["gather_sdpa", "triton", "flash_attn"])
def test_whoever_is_named_is_taken_for_no_other(card: None, name: str) -> None:
    assert backend.settled(name, CUDA, HALF, SHAPES) == name


def test_another_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"attention_backend = 'flash'.*auto, gather_sdpa, triton, flash_attn"
    ):
        choose_backend("flash", CPU, torch.float32, SHAPES, 16)


@needs_triton
def test_every_name_that_settings_accept_is_one(flash_on_a_card: None) -> None:
    for name in BLOCK_SIZES:
        device, dtype = (CUDA, torch.bfloat16) if name == "flash_attn" else (CPU, torch.float32)
        assert choose_backend(name, device, dtype, SHAPES[:1], 256).name == name


def refused(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    width: int = 64,
    *,
    name: str = "triton",
    block_size: int = 16,
    shapes: tuple[LayerShape, ...] = SHAPES,
) -> str:
    with pytest.raises(ConfigError) as caught:
        choose_backend(name, device, dtype, [*shapes, LayerShape(1, width, 64)], block_size)
    assert caught.value.field == "attention_backend"
    assert "use auto or gather_sdpa" in caught.value.accepted
    return caught.value.accepted


def paged_kernels() -> Any:
    """Imports Triton."""
    from replica.attention import paged_kernels

    return paged_kernels


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

    @pytest.mark.parametrize(
        ("error", "told"),
        [
            (
                RuntimeError("Failed to find C compiler."),
                r"needs a C compiler \(gcc, clang, .* and Python's headers: RuntimeError: Failed to find C",
            ),
            (
                torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
                r"cuda:0 has no memory left for it: CUDA out of memory\. Tried",
            ),
            (RuntimeError("Triton Error [CUDA]: out of memory"), "cuda:0 has no memory left for it: Triton"),
        ],
        ids=["no compiler", "a full card", "no room for its code"],
    )
    def test_on_a_machine_where_no_kernel_can_be_started(
        self, error: RuntimeError, told: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first forward found it, and ended the replica; a full card was told of as no compiler."""

        class Kernel:
            def __getitem__(self, grid: tuple[int]) -> Any:
                raise error

        beside_a_card(monkeypatch, "triton")
        monkeypatch.setattr(triton_paged, "is_interpreted", lambda: False)
        monkeypatch.setattr(triton_paged, "on_device", lambda device: nullcontext())
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *shape, device, dtype: zeros(*shape, dtype=dtype))
        monkeypatch.setattr(paged_kernels(), "touch", Kernel())
        assert re.search(told, refused(CUDA))
        assert backend.settled("auto", CUDA, HALF, SHAPES) == "gather_sdpa"

    def test_what_is_tried_is_a_kernel(self) -> None:
        number = torch.zeros(1, dtype=torch.int32)
        paged_kernels().touch[(1,)](number)
        assert number.item() == 1

    def test_numbers_it_does_not_compute(self) -> None:
        assert "not float64" in refused(CPU, dtype=torch.float64)


def refused_by_flash(
    device: torch.device = CUDA,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 256,
    shape: LayerShape = SHAPES[0],
) -> str:
    return refused(device, dtype, name="flash_attn", block_size=block_size, shapes=(shape,))


def test_flash_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "package flash-attn, which is not installed" in refused_by_flash()


@pytest.mark.usefixtures("flash_on_a_card")
class TestFlash:
    """Asked for by name where it cannot serve."""

    def test_on_a_cpu(self) -> None:
        assert "runs on CUDA devices; this one is cpu" in refused_by_flash(CPU)

    def test_on_an_older_card(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert "needs compute capability 8.0; cuda:0 has 7.5" in refused_by_flash()

    def test_numbers_it_does_not_compute(self) -> None:
        assert "computes float16 and bfloat16, not float32" in refused_by_flash(dtype=torch.float32)

    @pytest.mark.parametrize("block_size", [16, 128, 384])
    def test_blocks_it_does_not_read(self, block_size: int) -> None:
        told = refused_by_flash(block_size=block_size)
        assert f"a multiple of 256 tokens; block_size is {block_size}" in told

    @pytest.mark.parametrize(
        ("shape", "reason"),
        [
            (LayerShape(2, 64, 64, has_sinks=True), "no attention sinks"),
            (LayerShape(1, 192, 128), "this model's are 192 and 128 wide"),
            (LayerShape(1, 512, 512), "this model has one of 512"),
            (LayerShape(1, 60, 60), "in steps of 8; this model has one of 60"),
        ],
        ids=["sinks", "latent", "wide", "odd"],
    )
    def test_layers_it_does_not_compute(self, shape: LayerShape, reason: str) -> None:
        assert reason in refused_by_flash(shape=shape)

    def test_a_version_without_block_tables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        old = FlashFunctions(lambda q, k_cache, v_cache, window_size, softcap: q, FLASH.packed)
        monkeypatch.setattr(flash_paged, "_functions", lambda: old)
        assert "is too old: its functions take no block_table" in refused_by_flash()

    def test_a_package_that_was_built_for_another_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken() -> FlashFunctions:
            raise ImportError("undefined symbol: _ZN3c10")

        monkeypatch.setattr(flash_paged, "_functions", broken)
        assert "cannot be imported: undefined symbol" in refused_by_flash()

    def test_a_package_that_is_another_of_that_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """flash-attn 4 has no module of its own at the top."""
        monkeypatch.undo()
        beside_a_card(monkeypatch, "flash_attn")
        monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
        told = refused_by_flash()
        assert "is not flash-attn 2" in told
        assert "flash_attn_with_kvcache" in told


def test_nobody_imports_triton_who_did_not_ask_for_it() -> None:
    program = (
        "import sys, torch\n"
        "import replica.runners.model_runner\n"
        "from replica.attention.backend import choose_backend\n"
        "choose_backend('auto', torch.device('cpu'), torch.float32, [], 16)\n"
        "assert not {'triton', 'flash_attn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[4])
