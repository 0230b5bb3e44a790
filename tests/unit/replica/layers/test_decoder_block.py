"""The CPU's decoder layers answer as families' own. When they do not: `test_layer_swap.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replica.attention.interface import ATTENTION_NAME
from replica.layers import decoder_block, layer_parts
from replica.layers.combining_linear import find_combining_kernels
from replica.layers.decoder_block import DecoderBlock, fuse_blocks
from tests.layer_models import check_all_replaced, fuse, model_of

needs_kernels = pytest.mark.skipif(find_combining_kernels() is None, reason="this torch has no oneDNN")
pytestmark = needs_kernels


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 33])
@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {}),
        ("llama", {"hidden_size": 512, "intermediate_size": 640, "head_dim": 128, "mlp_bias": True}),
        ("qwen2", {}),  # biases of query, key and value
        ("qwen3", {"head_dim": 32}),  # norms of query and key; heads wider than the rows
        ("mistral", {"sliding_window": 10}),
    ],
)
def test_a_replaced_layer_answers_alike(model_type: str, settings: dict[str, Any], num_tokens: int) -> None:
    check_all_replaced(model_of(model_type, **settings), fuse_blocks, DecoderBlock, num_tokens, 1e-5)


def test_half_precision_stays() -> None:
    assert fuse(model_of("llama").to(torch.bfloat16), fuse_blocks) == 0


def test_an_answer_that_differs_by_more_than_rounding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = decoder_block._norm
    monkeypatch.setattr(decoder_block, "_norm", lambda norm: lambda rows: own(norm)(rows) * (1 + 1e-4))
    assert fuse(model_of("llama"), fuse_blocks) == 0


def test_another_epsilon_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which only counts in rows that are nearly zero."""
    model = model_of("llama", rms_norm_eps=1e-5)
    own = decoder_block._norm

    def other(norm: Any) -> Any:
        norm.epsilon = 1e-6
        answer = own(norm)
        norm.epsilon = 1e-5
        return answer

    monkeypatch.setattr(decoder_block, "_norm", other)
    assert fuse(model, fuse_blocks) == 0


def test_norms_of_query_and_key_that_are_left_out_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_parts, "_head_norms", lambda *_: None)
    assert fuse(model_of("qwen3", head_dim=32), fuse_blocks) == 0


def test_without_the_kernels_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_block, "find_combining_kernels", lambda: None)
    model = model_of("llama")
    assert fuse(model, fuse_blocks) == 0
    assert model.config._attn_implementation != ATTENTION_NAME  # nor was it run
