"""Whether Router, replicas and Serve's own options fit each other: each is right by itself.

What both sides need is given once (`deploy/config.py`). Left are settings that one side has and that the
other's make useless: found here, before anybody wonders why nothing is routed by prefix.
Knows settings; starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cache.errors import ConfigError
from deploy.scaling_options import POLICY, targets_of
from replica.config import ReplicaConfig
from router.config import RouterConfig
from router.sampling import OF_PROBABILITIES

# `max_ongoing_requests` where a file says nothing; Serve's own is 5.
ROUTER_MAX_ONGOING = 10_000
REPLICA_MAX_ONGOING = 1_000


def check_agreement(
    router: RouterConfig,
    replica: ReplicaConfig,
    options: Mapping[str, Any],
    router_options: Mapping[str, Any],
    where: str,
) -> None:
    """options: Serve's, of the deployment of replicas; router_options: of that of Routers. where: both are.

    Raises ConfigError for the first that does not fit.
    """
    check_settings(router, replica)
    _check_places(replica, options, f"{where}.Replica")
    _check_entrance(replica, router_options, f"{where}.Router")
    _check_scaling(router, options, f"{where}.Replica")
    _check_who_scales(router_options, f"{where}.Router")


def check_settings(router: RouterConfig, replica: ReplicaConfig) -> None:
    """`check_agreement` without Serve's options, which `serve deploy` does not let us see.

    Raises ConfigError for the first that does not fit.
    """
    _check_heartbeat(router, replica)
    _check_waits(router, replica)
    _check_host_memory(replica)
    _check_sampling(router, replica)


def _check_heartbeat(router: RouterConfig, replica: ReplicaConfig) -> None:
    if router.silent_after_s <= replica.heartbeat_interval_s:
        needed = (
            f"must be more than args.replica.heartbeat_interval_s ({replica.heartbeat_interval_s}): "
            "idle replicas would pass for silent ones, and their caches for unknown"
        )
        raise ConfigError("args.router.silent_after_s", router.silent_after_s, needed)


def _check_waits(router: RouterConfig, replica: ReplicaConfig) -> None:
    """Bound at once, requests wait in engines: as long as the engine lets them."""
    if router.binding != "at_once" or replica.max_wait_s is None:
        return
    if router.max_wait_s is None or router.max_wait_s > replica.max_wait_s:
        needed = (
            f"must be at most args.replica.max_wait_s ({replica.max_wait_s}) where binding is at_once: "
            "replicas refuse whom Routers let wait there"
        )
        raise ConfigError("args.router.max_wait_s", router.max_wait_s, needed)


def _check_sampling(router: RouterConfig, replica: ReplicaConfig) -> None:
    """Each request that does not name it would be refused."""
    if replica.runner != "simulated":
        return
    for name in router.sampling_defaults:
        if name not in OF_PROBABILITIES:
            needed = f"must be without {name} where args.replica.runner is simulated: there are no logits"
            raise ConfigError("args.router.default_sampling", router.default_sampling, needed)


def _check_places(replica: ReplicaConfig, options: Mapping[str, Any], where: str) -> None:
    """Routers send a replica as many as its engine takes."""
    ongoing = options.get("max_ongoing_requests", REPLICA_MAX_ONGOING)
    _check_ongoing(where, ongoing, replica, "Serve turns away what Routers send")


def _check_entrance(replica: ReplicaConfig, router_options: Mapping[str, Any], where: str) -> None:
    """A Router is one call for each client, from the first byte to the last, and it is it that refuses."""
    ongoing = router_options.get("max_ongoing_requests", ROUTER_MAX_ONGOING)
    _check_ongoing(where, ongoing, replica, "Serve holds clients back before a Router hears of them")


def _check_ongoing(where: str, ongoing: int, replica: ReplicaConfig, otherwise: str) -> None:
    """At least what one replica takes."""
    places = replica.max_running + replica.max_waiting
    if ongoing < places:
        needed = (
            f"must be at least {places}: args.replica.max_running ({replica.max_running}) and max_waiting "
            f"({replica.max_waiting}), or {otherwise}"
        )
        raise ConfigError(f"{where}.max_ongoing_requests", ongoing, needed)


def _check_scaling(router: RouterConfig, options: Mapping[str, Any], where: str) -> None:
    targets = targets_of(options)
    if targets is None or router.max_wait_s is None or targets.target_queued_s < router.max_wait_s:
        return
    needed = (
        f"must be less than args.router.max_wait_s ({router.max_wait_s}): Routers refuse before so much waits"
    )
    where = f"{where}.autoscaling_config.policy.policy_kwargs.target_queued_s"
    raise ConfigError(where, targets.target_queued_s, needed)


def _check_who_scales(router_options: Mapping[str, Any], where: str) -> None:
    """Routers tell it nothing, and of whom it hears nothing it lets there be as many as there are."""
    if targets_of(router_options) is not None:
        where = f"{where}.autoscaling_config.policy.policy_function"
        raise ConfigError(where, POLICY, "must be another: this one goes by what replicas' engines tell")


def _check_host_memory(replica: ReplicaConfig) -> None:
    """What is not named is not kept when it is evicted, and `recompute` keeps nothing of who is put back."""
    if replica.host_cache_gib and not replica.prefix_caching and replica.preemption == "recompute":
        needed = (
            "must be 0 where prefix_caching is false and preemption recompute: nothing would ever be in it"
        )
        raise ConfigError("args.replica.host_cache_gib", replica.host_cache_gib, needed)
