"""The ways to run Serve: what sets them apart is the environment, and who carries pieces of streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.overhead.modes import Mode, available_modes
from benchmarks.overhead.server import deploy_content
from deploy.environment import fast_proxy_installed
from deploy.ports import Ports


@pytest.mark.parametrize("mode", [Mode.CALLS, *available_modes()])
def test_the_environment_is_the_modes(mode: Mode, tmp_path: Path) -> None:
    environment = mode.environment(Ports(20_000), tmp_path)
    assert environment.get("RAY_SERVE_THROUGHPUT_OPTIMIZED", "0") == str(
        int(mode in (Mode.THROUGHPUT, Mode.FAST))
    )
    assert ("RAY_SERVE_PROXY_USE_GRPC" in environment) == (mode is Mode.THROUGHPUT)
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == str(int(mode is Mode.FAST))
    assert mode.has_channel == (mode is not Mode.CALLS)


def test_the_fast_proxy_is_measured_where_it_is_installed() -> None:
    assert (Mode.FAST in available_modes()) == fast_proxy_installed()
    assert Mode.CALLS not in available_modes()  # only where it is asked for


def test_every_step_of_the_simulated_replicas_takes_as_long() -> None:
    content = deploy_content(0.005, 3)
    replica = content["applications"][0]["args"]["replica"]
    assert replica["runner"] == "simulated"
    assert replica["sim"] == {
        "base_s": 0.005,
        "per_token_s": 0.0,
        "per_attention_s": 0.0,
        "per_sequence_s": 0.0,
    }
    (replicas,) = [each for each in content["applications"][0]["deployments"] if each["name"] == "Replica"]
    assert replicas["num_replicas"] == 3
    assert "stream_interval_s" not in replica  # as shipped
    content = deploy_content(0.005, 3, 0.04)
    assert content["applications"][0]["args"]["replica"]["stream_interval_s"] == 0.04
