"""A decoder layer is replaced only where what takes its place answers alike: CPUs' blocks, and cards'."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from replica.layers import card_block, decoder_block, layer_swap
from replica.layers.card_block import CardBlock
from replica.layers.combining_linear import find_combining_kernels
from replica.layers.decoder_block import DecoderBlock
from replica.layers.fused_norm import fuse_norms
from tests.layer_models import FuseBlocks, fuse, model_of
from tests.triton_interpreter import needs_triton


@dataclass(frozen=True, slots=True)
class Kind:
    """Of block, and a type in which it takes layers."""

    fuse_blocks: FuseBlocks
    block: type[nn.Module]
    dtype: torch.dtype

    def fuse(self, model: Any) -> int:
        return fuse(model.to(self.dtype), self.fuse_blocks)


needs_kernels = pytest.mark.skipif(find_combining_kernels() is None, reason="this torch has no oneDNN")


@pytest.fixture(
    params=[
        pytest.param(Kind(decoder_block.fuse_blocks, DecoderBlock, torch.float32), marks=needs_kernels),
        pytest.param(Kind(card_block.fuse_blocks, CardBlock, torch.float32), marks=needs_triton),
        pytest.param(Kind(card_block.fuse_blocks, CardBlock, torch.bfloat16), marks=needs_triton),
    ],
    ids=["CPUs", "cards, float32", "cards, bfloat16"],
)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def test_what_a_layer_says_to_attention_is_kept(kind: Kind) -> None:
    model = model_of("mistral", sliding_window=10)
    model.model.layers[0].self_attn.scaling = 0.3
    assert kind.fuse(model) == 2
    first, second = (layer._attending for layer in model.model.layers)
    assert (first.window, first.scale) == (10, 0.3)
    assert (second.window, second.scale) == (10, 16**-0.5)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gemma2", {"head_dim": 16}),  # four norms, each of one plus its weight; gelu
        ("granite", {"residual_multiplier": 0.98}),  # which rounding in half precision would hide
        ("cohere", {}),  # turns neighbours against each other; both halves read the same rows
        ("glm", {"head_dim": 16}),  # turns half of each head
        ("stablelm", {}),  # turns a quarter of each head
        ("olmo2", {}),  # norms after, and over all heads at once
        ("llama", {"hidden_act": "gelu"}),
        ("phi3", {}),  # one linear layer for query, key and value
        ("qwen3_moe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}),
    ],
)
def test_a_layer_that_computes_otherwise_stays_as_it_was(
    model_type: str, settings: dict[str, Any], kind: Kind
) -> None:
    model = model_of(model_type, **settings).to(kind.dtype)
    fuse_norms(model)
    layers = list(model.model.layers)
    before = {name: numbers.clone() for name, numbers in model.state_dict().items()}
    assert kind.fuse(model) == 0
    assert list(model.model.layers) == layers
    for name, numbers in model.state_dict().items():
        assert numbers.dtype == before[name].dtype
        assert torch.equal(numbers, before[name]), f"{name} was changed"


def test_what_somebody_listens_to_stays(kind: Kind) -> None:
    model = model_of("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert kind.fuse(model) == 1
    assert not isinstance(model.model.layers[0], kind.block)


def test_a_layer_that_is_used_twice_stays(kind: Kind) -> None:
    model = model_of("llama", num_hidden_layers=2)
    model.model.layers[1] = model.model.layers[0]
    fuse_norms(model)
    assert kind.fuse_blocks(model.to(kind.dtype), lambda: None) == 0


def test_a_position_that_changes_the_queries_is_seen(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is like the others but for tokens far from the first."""
    model = model_of("llama")
    layer = model.model.layers[0]
    own = layer.self_attn.forward

    def forward(hidden_states: torch.Tensor, position_ids: torch.Tensor, **options: Any) -> Any:
        scale = 1.0 + (position_ids > 200)[..., None].to(hidden_states.dtype)
        return own(hidden_states=hidden_states * scale, position_ids=position_ids, **options)

    monkeypatch.setattr(layer.self_attn, "forward", forward)
    assert kind.fuse(model) == 1
    assert not isinstance(model.model.layers[0], kind.block)


def test_weights_are_given_back_layer_by_layer(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", num_hidden_layers=3)
    weights = [weakref.ref(layer.mlp.up_proj.weight) for layer in model.model.layers]
    alive: list[int] = []
    own = layer_swap._swapped

    def counting(*args: Any) -> Any:
        alive.append(sum(weight() is not None for weight in weights))
        return own(*args)

    monkeypatch.setattr(layer_swap, "_swapped", counting)
    assert kind.fuse(model) == 3
    assert alive == [3, 2, 1]
    assert not any(weight() is not None for weight in weights)


def test_a_kernel_that_is_not_for_this_card_leaves_the_layer_as_loaded(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton's errors are of no kind but its own."""

    class OutOfResources(Exception):
        """As `triton.OutOfResources`."""

    def refused(*_: Any, **__: Any) -> Any:
        raise OutOfResources("shared memory, Required: 300000, Hardware limit: 232448")

    monkeypatch.setattr(kind.block, "forward", refused)
    model = model_of("llama").to(kind.dtype)
    layers = list(model.model.layers)
    with caplog.at_level("INFO"):
        assert kind.fuse(model) == 0
    assert list(model.model.layers) == layers
    assert {each.dtype for each in model.parameters()} == {kind.dtype}
    told = "a decoder layer stays as loaded: OutOfResources: shared memory, Required: 300000"
    assert any(message.startswith(told) for message in caplog.messages)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("Triton Error [CUDA]: out of memory"),  # of a kernel's code
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["torch", "Triton", "cuBLAS"],
)
def test_memory_that_ran_out_is_no_reason_to_leave_a_layer_as_loaded(
    kind: Kind, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few layers would then be slow for as long as the replica lives, and nobody would know why."""

    def short(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(layer_swap, "_attending", short)
    model = model_of("llama").to(kind.dtype)
    with pytest.raises(type(error)) as raised:
        kind.fuse(model)
    assert raised.value is error
    assert {each.dtype for each in model.parameters()} == {kind.dtype}
