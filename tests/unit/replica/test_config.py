"""Settings check themselves, and cross process borders as plain values."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from cache.errors import ConfigError
from cache.fingerprint import HashAlgorithm
from replica.config import ReplicaConfig, SimConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("runner", "real"),
        ("device", "tpu"),
        ("block_size", 0),
        ("max_waiting", 0),
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


def test_from_mapping_takes_plain_values() -> None:
    config = ReplicaConfig.from_mapping(
        {"hash_algorithm": "sha256", "sim": {"num_blocks": 7}, "num_blocks": None, "stream_interval_s": 1}
    )
    assert config == ReplicaConfig(
        hash_algorithm=HashAlgorithm.SHA256, sim=SimConfig(num_blocks=7), stream_interval_s=1.0
    )


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"blok_size.*nearest: block_size"):
        ReplicaConfig.from_mapping({"blok_size": 16})
    with pytest.raises(ConfigError, match=r"sim\.num_block .*nearest: sim\.num_blocks"):
        ReplicaConfig.from_mapping({"sim": {"num_block": 16}})


def test_wrong_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        ReplicaConfig.from_mapping({"block_size": "16"})


def test_config_survives_pickling() -> None:
    config = ReplicaConfig(runner="simulated", num_blocks=9)
    assert pickle.loads(pickle.dumps(config)) == config
