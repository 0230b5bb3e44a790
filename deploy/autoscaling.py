"""Autoscaling by work that waits: `policy_function` of the replicas' `autoscaling_config` in deploy.yaml.

Serve hands it what each replica told (`replica/demand.py`), in the mean of `look_back_period_s`, and acts on
its answer: after `upscale_delay_s` or `downscale_delay_s` of the same opinion, within min_replicas and
max_replicas. Who goes finishes its streams, or hands them over (`replica/departure.py`).

Serve ships this module by value and its imports by reference, so it holds no state of its own and decides
nothing. Written against ray 2.60, where a policy that takes settings is a class, built once.
"""

from __future__ import annotations

import logging
from typing import Any

from deploy.wanted_replicas import Fleet, Targets, wanted_replicas
from replica.demand import BUSY_KEY, HELD_KEY, QUEUED_KEY, REFUSED_KEY

logger = logging.getLogger("ray.serve")  # Serve's documented one: it ends in the controller's log


class QueuedWork:
    """A policy of Serve's: called several times a second, on its controller."""

    def __init__(self, **targets: Any) -> None:
        """targets: fields of `Targets`. Raises ConfigError for a value out of range."""
        self._targets = Targets(**targets)
        self._told: int | None = None  # of the log: what was wanted last, where that is not what there is

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """context: Serve's AutoscalingContext. How many replicas are wanted, and nothing to remember."""
        fleet = fleet_of(context)
        wanted = wanted_replicas(fleet, self._targets)
        self._tell(wanted, fleet)
        return wanted, {}

    def _tell(self, wanted: int, fleet: Fleet) -> None:
        """Why, when it changes. Serve itself says only that, and after its delay."""
        if wanted != fleet.num_target and wanted != self._told:
            logger.info(
                "%d replicas wanted of %d: %.2f s of work wait for each (target %g), each is %.2f busy "
                "and would be %.2f more with what Routers refuse (%g)",
                wanted,
                fleet.num_target,
                fleet.queued_s / max(1, fleet.num_running),
                self._targets.target_queued_s,
                fleet.busy / max(1, fleet.num_running),
                fleet.refused / max(1, fleet.num_running),
                self._targets.target_busy,
            )
        self._told = None if wanted == fleet.num_target else wanted


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
        refused=sum(told.get(REFUSED_KEY, {}).values()),
        least=context.capacity_adjusted_min_replicas,
        most=context.capacity_adjusted_max_replicas,
    )
