"""What transformers hands to attention: noted while probing, written and attended afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from replica.attention import interface
from replica.attention.backend import AttentionCall
from replica.attention.interface import ATTENTION_NAME, UnsupportedAttention, paged_attention
from replica.attention.kv_pages import ATTRIBUTE, KVPages, LayerPages, LayerShape
from replica.attention.step_batch import StepBatch
from tests.fakes.steps import CPU, scheduled, step

QUERY, KEY, VALUE = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 6)


class Recording:
    """A backend that keeps what it was called with."""

    name = "recording"

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def close(self) -> None:
        self.calls.clear()

    def attend(self, pages: LayerPages, batch: StepBatch, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        return torch.full((3, 4, 6), 5.0)


def attend(module: nn.Module, **options: Any) -> torch.Tensor:
    return paged_attention(module, QUERY, KEY, VALUE, options.pop("attention_mask", None), **options)[0]


def test_a_module_without_pages_is_probed_for_its_shape() -> None:
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    probed = attend(model[1], scaling=1.0)
    assert probed.shape == (1, 3, 4, 6)
    assert interface.probed_layers(model) == [(model[1], LayerShape(2, 8, 6))]
    assert interface.probed_layers(model) == []  # the marks are gone


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention_mask": torch.zeros(1)}, "attention mask of its own"),
        ({"position_bias": torch.zeros(1)}, "adds position_bias"),
        ({"alibi": torch.zeros(1)}, "adds alibi"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_what_no_backend_computes_is_refused_while_probing(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedAttention, match=reason):
        attend(nn.Linear(1, 1), **options)


def test_a_module_that_says_it_is_not_causal_is_refused() -> None:
    module = nn.Linear(1, 1)
    module.is_causal = False  # type: ignore[assignment]
    with pytest.raises(UnsupportedAttention, match="later tokens"):
        attend(module)


def test_a_module_that_attends_twice_is_refused() -> None:
    module = nn.Linear(1, 1)
    attend(module)
    with pytest.raises(UnsupportedAttention, match="more than once"):
        attend(module)


def bound() -> tuple[nn.Module, KVPages, Recording]:
    module, backend = nn.Linear(1, 1), Recording()
    pages = KVPages(
        [module],
        [LayerShape(2, 8, 6)],
        num_blocks=2,
        block_size=4,
        dtype=torch.float32,
        device=CPU,
        backend=backend,
    )
    pages.batch = step(scheduled("s", [1], 0, 3))
    return module, pages, backend


def test_a_bound_module_writes_its_pages_and_hands_the_step_to_the_backend() -> None:
    module, _, backend = bound()
    out = attend(module, scaling=0.25, sliding_window=7, softcap=3.0, s_aux=torch.ones(4), unknown="dropped")
    assert out.shape == (1, 3, 4, 6)
    assert out.eq(5).all()
    pages: LayerPages = module.__dict__[ATTRIBUTE]
    assert pages.keys[1, :3].eq(1).all()
    assert pages.values[1, :3].eq(1).all()
    (call,) = backend.calls
    assert (call.scale, call.window, call.softcap) == (0.25, 7, 3.0)
    assert call.sinks is not None
    assert call.query.shape == (4, 3, 8)


def test_defaults_are_the_usual_scale_and_no_window() -> None:
    module, _, backend = bound()
    attend(module, sliding_window=0, softcap=0.0)
    (call,) = backend.calls
    assert (call.scale, call.window, call.softcap, call.sinks) == (8**-0.5, None, None, None)


def test_a_forward_outside_a_step_is_a_bug_of_ours() -> None:
    module, pages, _ = bound()
    pages.batch = None
    with pytest.raises(AssertionError, match=r"outside ModelRunner\.execute"):
        attend(module)


def test_transformers_knows_the_name_and_builds_no_mask_for_it() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    interface.register()
    interface.register()
    assert AttentionInterface()[ATTENTION_NAME] is paged_attention
    assert ATTENTION_NAME not in AttentionMaskInterface()
