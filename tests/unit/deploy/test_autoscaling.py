"""The policy as Serve calls it: its own context, its own config, and its own way to ship a class."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from cache.errors import ConfigError
from deploy.autoscaling import QueuedWork, fleet_of
from deploy.wanted_replicas import Fleet
from replica.demand import BUSY_KEY, HELD_KEY, QUEUED_KEY, REFUSED_KEY


def context(
    told: dict[str, dict[str, float]] | None, *, running: int = 2, target: int = 2
) -> AutoscalingContext:
    return AutoscalingContext(
        deployment_id="Replica",
        deployment_name="Replica",
        app_name="warmpath",
        current_num_replicas=running,
        target_num_replicas=target,
        running_replicas=[],
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics=lambda: told,
        raw_metrics=None,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=10,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=None,
    )


def test_what_replicas_tell_is_summed_up() -> None:
    told = {
        QUEUED_KEY: {"a": 0.25, "b": 0.5},
        HELD_KEY: {"a": 1.5, "b": 2.0},  # b heard of it last
        BUSY_KEY: {"a": 1.0, "b": 0.5},
        REFUSED_KEY: {"a": 2.0, "b": 1.5},
        "running_requests": {"a": 7.0, "b": 7.0},  # Serve's own
    }
    expected = Fleet(2, 2, 0, queued_s=0.75 + 2 * 2.0, busy=1.5, refused=3.5, least=1, most=10)
    assert fleet_of(context(told)) == expected
    silent = fleet_of(context({BUSY_KEY: {"a": 1.0}}, running=3, target=4))
    assert silent == Fleet(3, 4, 2, queued_s=0.0, busy=1.0, refused=0.0, least=1, most=10)
    assert fleet_of(context(None)) == Fleet(2, 2, 2, queued_s=0.0, busy=0.0, refused=0.0, least=1, most=10)


def test_serve_ships_it_and_it_decides() -> None:
    """By value, as Serve's controller gets it, with settings from a file."""
    config = AutoscalingConfig(
        min_replicas=1,
        max_replicas=10,
        policy={
            "policy_function": "deploy.autoscaling:QueuedWork",
            "policy_kwargs": {"target_queued_s": 0.5},
        },
    )
    policy: Any = config.policy.get_policy()(**config.policy.policy_kwargs)
    busy = {BUSY_KEY: {"a": 1.0, "b": 1.0}, QUEUED_KEY: {"a": 1.0, "b": 0.5}, HELD_KEY: {"a": 0.0, "b": 0.0}}
    assert policy(context(busy)) == (3, {})
    idle: dict[str, dict[str, float]] = {key: {"a": 0.0, "b": 0.0} for key in busy}
    assert policy(context(idle)) == (1, {})
    assert policy(context({})) == (2, {})


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="target_queued_s"):
        QueuedWork(target_queued_s=0)


def test_why_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    policy = QueuedWork(target_queued_s=0.5)
    busy = {
        BUSY_KEY: {"a": 1.0, "b": 0.5},
        QUEUED_KEY: {"a": 1.0, "b": 0.5},
        REFUSED_KEY: {"a": 0.5, "b": 0.0},
    }
    calm = {BUSY_KEY: {"a": 0.7, "b": 0.7}}
    with caplog.at_level("INFO", logger="ray.serve"):
        for told in (calm, busy, busy, calm, busy):
            policy(context(told))
    said = (
        "3 replicas wanted of 2: 0.75 s of work wait for each (target 0.5), each is 0.75 busy and would be "
        "0.25 more with what Routers refuse (0.8)"
    )
    assert [record.getMessage() for record in caplog.records] == [said, said]
