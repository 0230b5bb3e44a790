"""Settings that are each right by themselves and do not go together are refused, with both named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cache.errors import ConfigError
from deploy.agreement import REPLICA_MAX_ONGOING, ROUTER_MAX_ONGOING
from deploy.app import Replica, Router
from deploy.serve_file import ServeFile

ROOT = Path(__file__).resolve().parents[3]
POLICY = "deploy.autoscaling:QueuedWork"


@pytest.fixture
def content() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "deploy.yaml").read_text())
    return loaded


def refusal(content: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        ServeFile.checked(Path("deploy.yaml"), content)
    return caught.value


def scaled_by_work(content: dict[str, Any], target_queued_s: float) -> None:
    replicas = content["applications"][0]["deployments"][1]
    del replicas["num_replicas"]
    replicas["autoscaling_config"] = {
        "min_replicas": 1,
        "max_replicas": 3,
        "policy": {"policy_function": POLICY, "policy_kwargs": {"target_queued_s": target_queued_s}},
    }


def test_a_heartbeat_that_comes_too_late_for_routers(content: dict[str, Any]) -> None:
    content["applications"][0]["args"]["replica"]["heartbeat_interval_s"] = 6.0
    error = refusal(content)
    assert (error.field, error.value) == ("args.router.silent_after_s", 5.0)
    assert "args.replica.heartbeat_interval_s (6.0)" in error.accepted
    content["applications"][0]["args"]["router"]["silent_after_s"] = 7.0
    ServeFile.checked(Path("deploy.yaml"), content)


@pytest.mark.parametrize("wait_s", [31.0, None])
def test_a_wait_that_replicas_refuse(content: dict[str, Any], wait_s: float | None) -> None:
    arguments = content["applications"][0]["args"]
    arguments["router"] |= {"max_wait_s": wait_s, "binding": "at_once"}
    error = refusal(content)
    assert (error.field, error.value) == ("args.router.max_wait_s", wait_s)
    assert "args.replica.max_wait_s (30.0)" in error.accepted
    arguments["router"]["binding"] = "late"  # then they wait at Routers
    ServeFile.checked(Path("deploy.yaml"), content)
    arguments["router"]["binding"] = "at_once"
    arguments["replica"]["max_wait_s"] = None
    ServeFile.checked(Path("deploy.yaml"), content)


def test_defaults_that_a_simulation_has_no_logits_for(content: dict[str, Any]) -> None:
    """Whoever does not name the field would get 400."""
    arguments = content["applications"][0]["args"]
    arguments["router"]["default_sampling"] = {"temperature": 0.5, "min_p": 0.1}
    ServeFile.checked(Path("deploy.yaml"), content)
    arguments["replica"]["runner"] = "simulated"
    error = refusal(content)
    assert (error.field, error.value) == ("args.router.default_sampling", {"temperature": 0.5, "min_p": 0.1})
    assert "must be without min_p" in error.accepted
    del arguments["router"]["default_sampling"]["min_p"]
    ServeFile.checked(Path("deploy.yaml"), content)


@pytest.mark.parametrize("deployment", ["Router", "Replica"])
def test_fewer_calls_than_one_replica_takes(content: dict[str, Any], deployment: str) -> None:
    """Serve would hold the others back, or refuse them, before anybody of ours hears of them."""
    options = next(d for d in content["applications"][0]["deployments"] if d["name"] == deployment)
    for few, enough in ((319, 320), ("319", "320.0")):  # Serve takes text for numbers, too
        options["max_ongoing_requests"] = few
        error = refusal(content)
        assert error.field == f"applications.warmpath.deployments.{deployment}.max_ongoing_requests"
        assert "at least 320" in error.accepted
        options["max_ongoing_requests"] = enough
        ServeFile.checked(Path("deploy.yaml"), content)
    del options["max_ongoing_requests"]  # then it is what `deploy/app.py` asks for
    ServeFile.checked(Path("deploy.yaml"), content)


def test_what_is_asked_of_serve_is_what_is_checked() -> None:
    """Its own five would let in five clients, in waves."""
    assert Router.max_ongoing_requests == ROUTER_MAX_ONGOING
    assert Replica.max_ongoing_requests == REPLICA_MAX_ONGOING


def test_a_recording_in_blocks_that_are_not_the_replicas(content: dict[str, Any]) -> None:
    arguments = content["applications"][0]["args"]
    arguments["router"]["record"] = {"folder": "/tmp", "block_tokens": 24}
    error = refusal(content)
    assert (error.field, error.accepted) == ("args.router.record.block_tokens", "must be a multiple of 16")
    arguments["replica"]["block_size"] = 8
    ServeFile.checked(Path("deploy.yaml"), content)


def test_host_memory_that_would_stay_empty(content: dict[str, Any]) -> None:
    replica = content["applications"][0]["args"]["replica"]
    replica |= {"host_cache_gib": 8, "prefix_caching": False}
    error = refusal(content)
    assert (error.field, error.value) == ("args.replica.host_cache_gib", 8.0)
    replica["preemption"] = "swap"
    ServeFile.checked(Path("deploy.yaml"), content)
    replica |= {"preemption": "recompute", "prefix_caching": True}
    ServeFile.checked(Path("deploy.yaml"), content)


def test_a_policy_of_replicas_that_is_given_to_routers(content: dict[str, Any]) -> None:
    """It would let there be as many as there are, whatever comes."""
    routers = content["applications"][0]["deployments"][0]
    del routers["num_replicas"]
    routers["autoscaling_config"] = {"max_replicas": 3, "policy": {"policy_function": POLICY}}
    error = refusal(content)
    assert error.field.endswith("Router.autoscaling_config.policy.policy_function")
    del routers["autoscaling_config"]["policy"]
    ServeFile.checked(Path("deploy.yaml"), content)


def test_a_queue_that_routers_never_let_grow(content: dict[str, Any]) -> None:
    scaled_by_work(content, 10.0)
    error = refusal(content)
    assert error.field.endswith("policy.policy_kwargs.target_queued_s")
    assert "args.router.max_wait_s (10.0)" in error.accepted
    content["applications"][0]["args"]["router"]["max_wait_s"] = None
    ServeFile.checked(Path("deploy.yaml"), content)
