"""Settings check themselves, and cross process borders as plain values."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from cache.errors import ConfigError
from replica import config
from replica.config import BLOCK_SIZES, ReplicaConfig, SimConfig, num_host_blocks


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


@pytest.mark.parametrize("backend", BLOCK_SIZES)
def test_a_block_size_that_the_backend_does_not_serve(backend: str) -> None:
    sizes = BLOCK_SIZES[backend]
    for size in (sizes[0], sizes[-1]):
        ReplicaConfig(attention_backend=backend, block_size=size)
    for size in (sizes[0] - 1, sizes[-1] + sizes.step):
        with pytest.raises(ConfigError, match=f"block_size = {size}: .* for {backend} attention"):
            ReplicaConfig(attention_backend=backend, block_size=size)


def test_left_to_choose_it_is_any_backends_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "BLOCK_SIZES", {"small": range(1, 65), "large": range(256, 1025, 256)})
    for size in (1, 64, 256, 1024):
        ReplicaConfig(block_size=size)
    ReplicaConfig(attention_backend="large", block_size=512)
    with pytest.raises(ConfigError, match="between 256 and 1024 in steps of 256 for large attention"):
        ReplicaConfig(attention_backend="large", block_size=64)
    with pytest.raises(ConfigError, match="1 and 64 for small attention, or between 256 and 1024"):
        ReplicaConfig(block_size=128)


def test_config_survives_pickling() -> None:
    config = ReplicaConfig(runner="simulated", num_blocks=9)
    assert pickle.loads(pickle.dumps(config)) == config


def test_swapping_needs_host_memory() -> None:
    with pytest.raises(ConfigError, match="preemption = 'swap': needs host memory: set host_cache_gib"):
        ReplicaConfig(preemption="swap")
    assert ReplicaConfig(preemption="swap", host_cache_gib=1.0).host_cache_gib == 1.0


def test_host_memory_holds_whole_blocks() -> None:
    assert num_host_blocks(0.0, 1 << 20) == 0
    assert num_host_blocks(1.0, 3 << 20) == 341
    with pytest.raises(ConfigError, match="must hold a block, 1048576 bytes, or be 0"):
        num_host_blocks(1e-6, 1 << 20)


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("runner", "simulated", "model"),
        ("async_scheduling", True, "false or auto"),
        ("greedy_screen", "on", "off or auto"),
        ("host_cache_gib", 1.0, "0"),
        ("device_share", 0.5, "1"),
    ],
)
def test_what_one_process_does_alone_is_refused_with_several(field: str, value: Any, accepted: str) -> None:
    ReplicaConfig(**{field: value})
    with pytest.raises(ConfigError, match=f"must be {accepted} where tensor_parallel is above 1") as caught:
        ReplicaConfig(tensor_parallel=2, **{field: value})
    assert caught.value.field == field


def test_a_model_is_not_cut_into_no_parts() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel = 0"):
        ReplicaConfig(tensor_parallel=0)


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::", "0", "00.0.0.0", "0.0", "::0", "0:0:0:0:0:0:0:0"])
def test_engines_do_not_publish_at_every_address(host: str) -> None:
    with pytest.raises(ConfigError, match="event_host"):
        ReplicaConfig(event_host=host)


@pytest.mark.parametrize("host", ["10.0..5", ".", f"{'x' * 64}.local"])
def test_engines_publish_where_a_socket_can(host: str) -> None:
    """It was a traceback."""
    with pytest.raises(ConfigError, match=r"^event_host = .*: must be an address or a name, whose parts"):
        ReplicaConfig(event_host=host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1%lo", "node", "replica-0.warmpath"])
def test_engines_publish_at_one(host: str) -> None:
    assert ReplicaConfig(event_host=host).event_host == host
