"""The kernels of rows, each on shapes of real layers and on odd ones, in Triton's interpreter.

Random shapes are `tests/property/test_triton_rows.py`'s, real cards `tests/gpu`'s. That the kernels compile,
spill nothing and load as much at once as a card can, needs no card.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replica.layers.triton_rows import TritonRows
from tests.compiled_kernels import compiled
from tests.row_cases import Rows
from tests.triton_interpreter import needs_triton

pytestmark = needs_triton

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 16, 96, 1000, 4096])
def test_norms_of_any_width(width: int, dtype: torch.dtype) -> None:
    Rows(dtype).check_norm(3, width)
    Rows(dtype).check_add_norm(3, width)


@pytest.mark.parametrize("size", [0.0, 1e-3, 100.0])
def test_epsilon_counts_in_rows_that_are_nearly_zero(size: float) -> None:
    Rows(torch.float32).check_norm(2, 64, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "normed heads"])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "dim"),
    [
        (4, 2, 64),
        (3, 1, 80),  # half a head is no power of two
        (32, 8, 128),  # more heads than one program turns
        (9, 9, 256),
        (71, 1, 64),
        (1, 1, 2),
    ],
)
def test_heads_of_any_shape_are_turned(
    num_queries: int, num_keys: int, dim: int, has_norms: bool, dtype: torch.dtype
) -> None:
    Rows(dtype).check_turn(3, num_queries, num_keys, dim, has_norms=has_norms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 96, 1024, 2500])
def test_swish_products_of_any_width(width: int, dtype: torch.dtype) -> None:
    Rows(dtype).check_swish_product(3, width)


def test_gates_of_any_size() -> None:
    """exp(-gate) would be infinite for some."""
    Rows(torch.float32).check_swish_product(2, 200, size=1000.0)


def test_rows_that_are_parts_of_others_are_read_as_they_are() -> None:
    kernels, wide = TritonRows(), torch.randn(3, 128)
    weight = torch.ones(64)
    part, whole = kernels.norm(wide[:, :64], weight, 1e-5), kernels.norm(wide[:, :64].clone(), weight, 1e-5)
    assert torch.equal(part, whole)


@pytest.mark.parametrize(
    ("heads", "angles"),
    [
        ((3, 6, 16), (3, 8)),  # half of each head is turned
        ((3, 6, 16), (1, 16)),
        ((3, 6, 15), (3, 15)),
    ],
    ids=["partial rotary", "one token's angles", "no halves"],
)
def test_what_is_turned_otherwise_is_refused(heads: tuple[int, ...], angles: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="angles"):
        TritonRows().turn(torch.randn(heads), 4, 1, torch.randn(angles), torch.randn(angles), None)


def test_heads_that_would_be_turned_in_a_copy_are_refused() -> None:
    heads = torch.randn(3, 8, 16)[:, :6]
    with pytest.raises(ValueError, match="contiguous"):
        TritonRows().turn(heads, 4, 1, torch.randn(3, 16), torch.randn(3, 16), None)


# Qwen3-8B's and Llama-3-70B's, and one whose sizes are no powers of two.
LAYERS: dict[str, dict[str, Any]] = {
    "8B": {"hidden": 4096, "mlp": 12_288, "heads": 32, "kv_heads": 8, "dim": 128, "has_norms": True},
    "70B": {"hidden": 8192, "mlp": 28_672, "heads": 64, "kv_heads": 8, "dim": 128},
    "odd": {"hidden": 2560, "mlp": 6_912, "heads": 32, "kv_heads": 32, "dim": 80},
}


def check_compiled(tmp_path: Path, *cases: dict[str, Any]) -> None:
    for case, answer in zip(cases, compiled(tmp_path, *cases), strict=True):
        assert set(answer) == {"norm", "turn", "swish_product"}
        for kernel, taken in answer.items():
            assert taken["spilled"] == 0, (kernel, case)
            assert taken["narrow"] == 0, (kernel, case)
            assert taken["registers"] <= 64, (kernel, case)  # 1,024 threads fill a processor's


def test_kernels_compile_for_cards_spill_nothing_and_load_sixteen_bytes_a_thread(tmp_path: Path) -> None:
    """The interpreter takes what the compiler refuses."""
    check_compiled(
        tmp_path,
        {"arch": 90, "number": "bf16", "layer": LAYERS["8B"]},
        {"arch": 80, "number": "fp32", "layer": LAYERS["odd"]},
    )


@pytest.mark.long
def test_every_kind_of_layer_compiles_for_two_generations(tmp_path: Path) -> None:
    cases = [
        {"arch": arch, "number": number, "layer": layer}
        for layer in LAYERS.values()
        for arch in (80, 90)
        for number in ("bf16", "fp16", "fp32")
    ]
    check_compiled(tmp_path, *cases)
