"""Settings check themselves, and cross process borders as plain values."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from cache.errors import ConfigError
from replica.config import ReplicaConfig, SimConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("runner", "real"),
        ("device", "tpu"),
        ("block_size", 0),
        ("max_waiting", 0),
        ("max_wait_s", 0.0),
        ("max_batched_tokens", 0),
        ("event_port", 65535),
        ("event_host", "0.0.0.0"),
        ("event_host", "*"),
        ("kv_memory_fraction", float("nan")),
        ("num_blocks", 0),
        ("max_model_len", 1),
    ],
)
def test_out_of_range_names_field_and_value(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ReplicaConfig(**{field: value})
    assert caught.value.field == field
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(("field", "value"), [("base_s", -1.0), ("vocab_size", 0), ("raise_every_steps", 0)])
def test_simulation_settings_are_checked_too(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"sim.{field}"):
        SimConfig(**{field: value})


def test_config_survives_pickling() -> None:
    config = ReplicaConfig(runner="simulated", num_blocks=9)
    assert pickle.loads(pickle.dumps(config)) == config
