"""How much of a card's memory is left to steps, found out without one."""

from __future__ import annotations

import pytest
import torch

from cache.errors import ConfigError
from replica.attention.kv_pages import LayerShape
from replica.config import ReplicaConfig
from replica.models import model_probe
from replica.runners import load_choices
from tests.layer_models import model_of

SHAPES = [LayerShape(2, 16, 16)] * 2


@pytest.mark.parametrize(
    ("settings", "max_model_len", "step"),
    [
        ({"max_batched_tokens": 64, "max_running": 8}, 1000, (72, 8)),
        ({"max_batched_tokens": 64, "max_running": 8}, 20, (72, 8)),  # short sequences fill a step together
        ({"max_batched_tokens": 64, "max_running": 2}, 20, (40, 2)),  # all that there can be
    ],
)
def test_a_full_step_is_measured_whoever_it_is_of(
    settings: dict[str, int], max_model_len: int, step: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def step_bytes(_model: object, num_tokens: int, num_rows: int, _max_model_len: int) -> int:
        measured.append((num_tokens, num_rows))
        return 0

    monkeypatch.setattr(load_choices, "step_bytes", step_bytes)
    config = ReplicaConfig(num_blocks=4, **settings)  # type: ignore[arg-type]
    assert load_choices.choose_num_blocks(config, "made up", model_of("llama"), SHAPES, max_model_len) == 4
    assert measured == [step]


@pytest.mark.parametrize("model_type", ["llama", "opt"])
def test_a_step_has_more_tokens_than_a_sequence_may(model_type: str) -> None:
    """opt has a table of positions, and an end of it."""
    model_probe.run_without_pages(model_of(model_type), num_tokens=600, num_rows=3, max_model_len=256)


def test_a_step_that_does_not_fit_at_all_is_refused_by_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def step_bytes(*_: object) -> int:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(load_choices, "step_bytes", step_bytes)
    config = ReplicaConfig(max_batched_tokens=100_000)
    with pytest.raises(ConfigError, match=r"max_batched_tokens.*100064 tokens in a step do not fit"):
        load_choices.choose_num_blocks(config, "made up", model_of("llama"), SHAPES, 1 << 17)
