"""Decoder layers for cards answer as families' own, in every type. When not: `test_layer_swap.py`, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from replica.attention.interface import recorded
from replica.layers.card_block import CardBlock, fuse_blocks
from replica.layers.triton_rows import TritonRows
from tests.fakes.recording import KernelRecorder
from tests.layer_models import check_all_replaced, fuse, model_of
from tests.model_families import FAMILIES, Family
from tests.triton_interpreter import needs_triton

pytestmark = needs_triton

# Relative, of logits: both ways round, and two layers add up.
MOST_DIFFERENCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}

MOVES_NOTHING = {
    *(
        "view",
        "select",
        "slice",
        "transpose",
        "t",
        "unsqueeze",
        "flatten",
        "detach",
        "empty_like",
        "new_empty",
    )
}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": (
        "llama",
        {"hidden_size": 320, "head_dim": 80, "mlp_bias": True, "attention_bias": True},
    ),
    "qwen2": ("qwen2", {}),  # biases of query, key and value
    "qwen3": ("qwen3", {"head_dim": 32}),  # norms of query and key; heads wider than the rows
    "mistral": ("mistral", {"sliding_window": 10}),
}


def _cases() -> Iterator[Any]:
    """Every model in full and half precision, with several tokens; the other half precision and one token for
    all models but the first in the broad suite."""
    for name, (model_type, settings) in MODELS.items():
        for dtype in MOST_DIFFERENCE:
            for num_tokens in (1, 5):
                is_broad = name != "llama" and (dtype is torch.float16 or num_tokens == 1)
                marks = (pytest.mark.long, pytest.mark.broad) if is_broad else ()
                case = f"{name}-{dtype}-{num_tokens}"
                yield pytest.param(model_type, settings, dtype, num_tokens, id=case, marks=marks)


@pytest.mark.parametrize(("model_type", "settings", "dtype", "num_tokens"), [*_cases()])
def test_a_replaced_layer_answers_alike(
    model_type: str, settings: dict[str, Any], dtype: torch.dtype, num_tokens: int
) -> None:
    model = model_of(model_type, **settings).to(dtype)
    check_all_replaced(model, fuse_blocks, CardBlock, num_tokens, MOST_DIFFERENCE[dtype])
    numbers = [*model.parameters(), *(layer._head_weights for layer in model.model.layers)]
    assert {each.dtype for each in numbers if each is not None} == {dtype}


def fused_family(family: Family) -> int:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(family.config(), dtype=torch.bfloat16).eval()
    return fuse(model, fuse_blocks)


@pytest.mark.parametrize(("name", "num_taken"), [("llama", 2), ("qwen2", 3), ("qwen3", 2), ("mistral", 2)])
def test_the_families_of_the_exactness_tests_are_taken(name: str, num_taken: int) -> None:
    """Scaled rotary embeddings, and windows in some layers."""
    assert fused_family(next(family for family in FAMILIES if family.name == name)) == num_taken


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "phi3", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_those_that_compute_otherwise_are_not(name: str) -> None:
    assert fused_family(next(family for family in FAMILIES if family.name == name)) == 0


def test_a_layer_that_turns_nothing_stays() -> None:
    assert fused_family(Family("smollm3", "smollm3", {"no_rope_layers": [1, 0]})) == 1


def test_a_layer_of_several_types_stays() -> None:
    model = model_of("llama").to(torch.bfloat16)
    model.model.layers[0].register_buffer("strange", torch.zeros(1))
    assert fuse(model, fuse_blocks) == 1
    assert model.model.layers[0].strange.dtype == torch.float32


def wrong_in_half(own: Callable[..., Any]) -> Callable[..., Any]:
    def computed(kernels: TritonRows, gate_up: torch.Tensor) -> Any:
        product = own(kernels, gate_up)
        return product if product.dtype == torch.float32 else product.roll(1, -1)

    return computed


def test_a_kernel_that_is_wrong_in_one_type_is_seen_in_that_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one could be that is compiled for each."""
    monkeypatch.setattr(TritonRows, "swish_product", wrong_in_half(TritonRows.swish_product))
    assert fuse(model_of("llama"), fuse_blocks) == 2
    assert fuse(model_of("llama").to(torch.bfloat16), fuse_blocks) == 0


def test_a_layer_is_four_products_and_four_kernels_and_nothing_is_read_back() -> None:
    """Recorded as a decode step is, and replayed over other rows at other positions."""
    model = model_of("qwen3", head_dim=32)
    assert fuse(model, fuse_blocks) == 2
    block, rotary = model.model.layers[0], model.model.rotary_emb
    recorder = KernelRecorder()
    kernels = block._kernels._kernels
    block._kernels._kernels = recorder.over(kernels, "norm", "turn", "swish_product")

    def embeddings(positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = rotary(torch.zeros(1), torch.tensor([positions]))
        return cosines, sines

    torch.manual_seed(1)
    rows, angles = torch.randn(1, 3, 64), embeddings([5, 0, 77])
    answer = torch.empty(1, 3, 64)

    def work() -> None:
        answer.copy_(block(rows, position_embeddings=angles))

    with torch.inference_mode(), recorded(block):
        replay = recorder.record(work)
        assert recorder.num_launches == 2 * 4, "twice while it is recorded"
        assert Counter(name for name in recorder.names if name not in MOVES_NOTHING) == {
            "linear": 3,
            "addmm_": 1,
            "repeat_interleave": 1,  # in attention's place
            "copy_": 1,  # what this test does with the answer
        }
        for positions in ([1, 2, 3], [200, 0, 9]):
            others, other_angles = torch.randn(1, 3, 64), embeddings(positions)
            wanted = block(others, position_embeddings=other_angles)
            rows.copy_(others)
            for mine, theirs in zip(angles, other_angles, strict=True):
                mine.copy_(theirs)
            replay()
            assert torch.equal(answer, wanted)
