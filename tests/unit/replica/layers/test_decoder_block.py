"""A decoder layer is replaced only where what takes its place answers alike."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from replica.attention.interface import ATTENTION_NAME
from replica.layers import decoder_block, layer_parts, layer_swap
from replica.layers.combining_linear import find_combining_kernels
from replica.layers.decoder_block import DecoderBlock, fuse_blocks
from replica.layers.fused_norm import fuse_norms
from replica.models import model_probe
from tests.layer_models import POSITIONS, logits, model_of

needs_kernels = pytest.mark.skipif(find_combining_kernels() is None, reason="this torch has no oneDNN")
pytestmark = needs_kernels


def fuse(model: Any) -> int:
    fuse_norms(model)
    return fuse_blocks(model, lambda: model_probe.probe_layers(model, POSITIONS))


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
    model = model_of(model_type, **settings)
    expected = logits(model, num_tokens)
    assert fuse(model) == 2
    assert sum(isinstance(module, DecoderBlock) for module in model.modules()) == 2
    found = logits(model, num_tokens)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_what_a_layer_says_to_attention_is_kept() -> None:
    model = model_of("mistral", sliding_window=10)
    model.model.layers[0].self_attn.scaling = 0.3
    assert fuse(model) == 2
    first, second = (layer._attending for layer in model.model.layers)
    assert (first.window, first.scale) == (10, 0.3)
    assert (second.window, second.scale) == (10, 16**-0.5)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gemma2", {"head_dim": 16}),  # four norms, each of one plus its weight; gelu
        ("granite", {"residual_multiplier": 0.5}),
        ("cohere", {}),  # turns neighbours against each other; both halves read the same rows
        ("glm", {"head_dim": 16}),  # turns half of each head
        ("stablelm", {}),  # turns a quarter of each head
        ("olmo2", {}),  # norms after, and over all heads at once
        ("llama", {"hidden_act": "gelu"}),
        ("phi3", {}),  # one linear layer for query, key and value
        ("qwen3_moe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}),
    ],
)
def test_a_layer_that_computes_otherwise_stays(model_type: str, settings: dict[str, Any]) -> None:
    model = model_of(model_type, **settings)
    layers = [type(layer) for layer in model.model.layers]
    assert fuse(model) == 0
    assert [type(layer) for layer in model.model.layers] == layers


def test_half_precision_stays() -> None:
    assert fuse(model_of("llama").to(torch.bfloat16)) == 0


def test_what_somebody_listens_to_stays() -> None:
    model = model_of("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert fuse(model) == 1
    assert not isinstance(model.model.layers[0], DecoderBlock)


def test_a_layer_that_is_used_twice_stays() -> None:
    model = model_of("llama", num_hidden_layers=2)
    model.model.layers[1] = model.model.layers[0]
    fuse_norms(model)
    assert fuse_blocks(model, lambda: None) == 0


def test_a_position_that_changes_the_queries_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is like the others but for tokens far from the first."""
    model = model_of("llama")
    layer = model.model.layers[0]
    own = layer.self_attn.forward

    def forward(hidden_states: torch.Tensor, position_ids: torch.Tensor, **options: Any) -> Any:
        scaled = hidden_states * (1.0 + (position_ids > 200)[..., None])
        return own(hidden_states=scaled, position_ids=position_ids, **options)

    monkeypatch.setattr(layer.self_attn, "forward", forward)
    assert fuse(model) == 1
    assert not isinstance(model.model.layers[0], DecoderBlock)


def test_an_answer_that_differs_by_more_than_rounding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = decoder_block._norm
    monkeypatch.setattr(decoder_block, "_norm", lambda norm: lambda rows: own(norm)(rows) * (1 + 1e-4))
    assert fuse(model_of("llama")) == 0


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
    assert fuse(model) == 0


def test_norms_of_query_and_key_that_are_left_out_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_parts, "_head_norms", lambda *_: None)
    assert fuse(model_of("qwen3", head_dim=32)) == 0


def test_weights_are_given_back_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", num_hidden_layers=3)
    fuse_norms(model)
    weights = [weakref.ref(layer.mlp.up_proj.weight) for layer in model.model.layers]
    alive: list[int] = []
    own = layer_swap._swapped

    def counting(*args: Any) -> Any:
        alive.append(sum(weight() is not None for weight in weights))
        return own(*args)

    monkeypatch.setattr(layer_swap, "_swapped", counting)
    assert fuse_blocks(model, lambda: model_probe.probe_layers(model, POSITIONS)) == 3
    assert alive == [3, 2, 1]
    assert not any(weight() is not None for weight in weights)


def test_without_the_kernels_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_block, "find_combining_kernels", lambda: None)
    model = model_of("llama")
    assert fuse(model) == 0
    assert model.config._attn_implementation != ATTENTION_NAME  # nor was it run
