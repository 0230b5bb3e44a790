"""`autoscaling_config`: what Serve finds out on its controller, or never, is named before anything starts."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml

from cache.errors import ConfigError
from deploy.scaling_options import POLICY, check_scaling, replica_bounds, targets_of
from deploy.serve_file import ServeFile
from deploy.wanted_replicas import Targets

ROOT = Path(__file__).resolve().parents[3]


def options(**scaling: Any) -> dict[str, Any]:
    return {"autoscaling_config": {"min_replicas": 1, "max_replicas": 4, **scaling}}


def policy(function: Any = POLICY, **kwargs: Any) -> dict[str, Any]:
    return {"policy": {"policy_function": function, "policy_kwargs": kwargs}}


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        (options(min_replica=2), "w.autoscaling_config", "did you mean 'min_replicas'"),
        (options(max_replicas=0), "w.autoscaling_config.max_replicas", "greater than 0"),
        (
            options(min_replicas=0),
            "w.autoscaling_config.min_replicas",
            "must be at least 1: without a replica",
        ),
        (options(min_replicas="0"), "w.autoscaling_config.min_replicas", "must be at least 1"),
        (options(min_replicas=5), "w.autoscaling_config", "max_replicas (4) must be greater"),
        (options(upscale_delay_s=-1), "w.autoscaling_config.upscale_delay_s", "greater than or equal to 0"),
        (options(policy={"function": POLICY}), "w.autoscaling_config.policy", "unknown key 'function'"),
        (
            options(**policy("deploy.autoscaling:Queue")),
            "w.autoscaling_config.policy.policy_function",
            POLICY,
        ),
        (options(**policy("no.such:thing")), "w.autoscaling_config.policy.policy_function", "No module"),
        (
            options(**policy(target_queue_s=1.0)),
            "w.autoscaling_config.policy.policy_kwargs",
            "did you mean 'target_queued_s'",
        ),
        (
            options(**policy(target_busy=1.5)),
            "w.autoscaling_config.policy.policy_kwargs.target_busy",
            "between 0.1 and 0.95",
        ),
        (
            options(**policy("deploy.autoscaling.QueuedWork", target_queued_s=-1)),
            "w.autoscaling_config.policy.policy_kwargs.target_queued_s",
            "between 0.01 and 3600.0",
        ),
        ({"autoscaling_config": 3}, "w.autoscaling_config", "must be a mapping"),
        (options(policy=3), "w.autoscaling_config.policy", "must be a mapping"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_scaling("w", given)
    assert caught.value.field == field
    assert said in str(caught.value)


def test_what_is_right_passes() -> None:
    check_scaling("w", {})
    check_scaling("w", options(metrics_interval_s=1, **policy(target_queued_s=2)))
    check_scaling("w", options(**policy("ray.serve.autoscaling_policy:default_autoscaling_policy")))
    check_scaling("w", {"num_replicas": "auto", "autoscaling_config": {"min_replicas": 3}})


def test_only_our_own_policy_has_targets() -> None:
    assert targets_of(options(**policy(target_queued_s=2))) == Targets(target_queued_s=2)
    assert targets_of(options(**policy("deploy.autoscaling.QueuedWork"))) == Targets()
    assert targets_of(options()) is None
    assert targets_of({}) is None


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({}, (1, 1)),
        ({"num_replicas": 3}, (3, 3)),
        (options(min_replicas=2), (2, 4)),
        ({"autoscaling_config": {}}, (1, 1)),
        ({"num_replicas": "auto"}, (1, 100)),
        (options(min_replicas="2", max_replicas="4.0"), (2, 4)),
    ],
)
def test_bounds(given: dict[str, Any], bounds: tuple[int, int]) -> None:
    assert replica_bounds(given) == bounds


def test_the_example_in_deploy_yaml_is_one() -> None:
    """Its lines are comments; taken out of them they are a file that passes."""
    lines = (ROOT / "deploy.yaml").read_text().splitlines()
    [begin] = [number for number, line in enumerate(lines) if "autoscaling_config:" in line]
    length = len(list(takewhile(lambda line: line.lstrip().startswith("#   "), lines[begin + 1 :]))) + 1
    lines[begin : begin + length] = [line.replace("# ", "", 1) for line in lines[begin : begin + length]]
    content = yaml.safe_load("\n".join(lines))
    replicas = content["applications"][0]["deployments"][1]
    del replicas["num_replicas"]
    file = ServeFile.checked(Path("deploy.yaml"), content)
    assert targets_of(file.options("Replica")) is not None
    assert replica_bounds(file.options("Replica")) == (file.num_replicas, 8)
