"""Autoscaling by work that waits: `policy_function` of the replicas' `autoscaling_config` in deploy.yaml.

Serve hands it what each replica told (`replica/demand.py`), in the mean of `look_back_period_s`, and acts on
its answer: after `upscale_delay_s` or `downscale_delay_s` of the same opinion, within min_replicas and
max_replicas. Who goes finishes its streams, or hands them over (`replica/departure.py`).

Serve ships this module by value and its imports by reference, so it holds no state and decides nothing.
Written against ray 2.60, where a policy that takes settings is a class.
"""

from __future__ import annotations

from typing import Any

from deploy.wanted_replicas import Fleet, Targets, wanted_replicas
from replica.demand import BUSY_KEY, HELD_KEY, QUEUED_KEY


class QueuedWork:
    """A policy of Serve's: called several times a second, on its controller."""

    def __init__(self, **targets: Any) -> None:
        """targets: fields of `Targets`. Raises ConfigError for a value out of range."""
        self._targets = Targets(**targets)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """context: Serve's AutoscalingContext. How many replicas are wanted, and nothing to remember."""
        return wanted_replicas(fleet_of(context), self._targets), {}


def fleet_of(context: Any) -> Fleet:
    """What Serve knows, summed up."""
    told = context.aggregated_metrics or {}
    busy, queued, held = (told.get(key, {}) for key in (BUSY_KEY, QUEUED_KEY, HELD_KEY))
    num_running = context.current_num_replicas
    # Each tells its share of what Routers hold, as it last heard of it: the highest is the freshest.
    held_s = max(held.values(), default=0.0) * num_running
    return Fleet(
        num_running=num_running,
        num_target=context.target_num_replicas,
        num_silent=max(0, num_running - len(busy)),
        queued_s=sum(queued.values()) + held_s,
        busy=sum(busy.values()),
        least=context.capacity_adjusted_min_replicas,
        most=context.capacity_adjusted_max_replicas,
    )
