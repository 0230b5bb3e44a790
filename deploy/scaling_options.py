"""How many replicas a deployment has, with what Serve finds only when it deploys, or never, refused.

Serve drops keys it does not know, builds the rest on its controller, and imports and builds the policy there.
Here all of that happens first. Knows Serve's options; knows neither Routers nor engines.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter, ValidationError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from cache.errors import ConfigError
from deploy.errors import UnknownKey
from deploy.wanted_replicas import Targets

POLICY = "deploy.autoscaling:QueuedWork"
AUTO_MAX_REPLICAS = 100  # Serve's own, for `num_replicas: auto`
_DEFAULTS = AutoscalingConfig()
_WHOLE = TypeAdapter(int)


def check_scaling(where: str, options: Mapping[str, Any]) -> None:
    """options: one deployment's. Raises UnknownKey, or ConfigError with key, value and range."""
    number, scaling = options.get("num_replicas"), options.get("autoscaling_config")
    if not (number is None or isinstance(number, int) or number == "auto"):
        # The one number that Serve does not take as text; it would name all options and not this.
        needed = "must be a whole number, and not in quotes, or auto"
        raise ConfigError(f"{where}.num_replicas", number, needed)
    if scaling is None:
        return
    where = f"{where}.autoscaling_config"
    if not isinstance(scaling, Mapping):
        raise ConfigError(where, scaling, "must be a mapping of settings")
    _refuse_unknown(where, scaling, AutoscalingConfig.model_fields)
    policy = scaling.get("policy")
    if policy is not None:
        _check_policy(f"{where}.policy", policy)
    start = {"max_replicas": AUTO_MAX_REPLICAS} if options.get("num_replicas") == "auto" else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is deprecated, Serve warns itself
            AutoscalingConfig(**{**start, **scaling})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([where, *(str(part) for part in first["loc"])])
        value = scaling if first["loc"] == () else first.get("input")
        raise ConfigError(key, value, first["msg"].removeprefix("Value error, ")) from None
    if replica_bounds(options)[0] == 0:
        needed = "must be at least 1: without a replica nothing waits that Serve could see"
        raise ConfigError(f"{where}.min_replicas", 0, needed)


def targets_of(options: Mapping[str, Any]) -> Targets | None:
    """What our own policy aims at, in options that were checked; None where it does not decide."""
    policy = (options.get("autoscaling_config") or {}).get("policy") or {}
    if _same_path(policy.get("policy_function")) != POLICY:
        return None
    return Targets(**(policy.get("policy_kwargs") or {}))


def replica_bounds(options: Mapping[str, Any]) -> tuple[int, int]:
    """Fewest and most replicas of a deployment whose options were checked."""
    scaling, number = options.get("autoscaling_config"), options.get("num_replicas")
    if scaling is None and number != "auto":
        number = 1 if number is None else _whole(number)
        return number, number
    scaling = scaling or {}
    most = AUTO_MAX_REPLICAS if number == "auto" else _DEFAULTS.max_replicas
    fewest = scaling.get("min_replicas", _DEFAULTS.min_replicas)
    return _whole(fewest), _whole(scaling.get("max_replicas", most))


def _whole(value: Any) -> int:
    """A whole number of options that were checked, as Serve reads it: it takes text for numbers, too."""
    return _WHOLE.validate_python(value)


def _check_policy(where: str, policy: Any) -> None:
    if not isinstance(policy, Mapping):
        raise ConfigError(where, policy, "must be a mapping of settings")
    _refuse_unknown(where, policy, AutoscalingPolicy.model_fields)
    function = policy.get("policy_function")
    if function is not None:
        try:
            AutoscalingPolicy(policy_function=function)
        except (ImportError, AttributeError, ValueError) as error:
            needed = f"must be module:name of a policy that can be imported, such as {POLICY} ({error})"
            raise ConfigError(f"{where}.policy_function", function, needed) from None
    if _same_path(function) != POLICY:
        return
    where, kwargs = f"{where}.policy_kwargs", policy.get("policy_kwargs") or {}
    if not isinstance(kwargs, Mapping):
        raise ConfigError(where, kwargs, "must be a mapping of settings")
    _refuse_unknown(where, kwargs, [field.name for field in fields(Targets)])
    try:
        Targets(**kwargs)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error.field}", error.value, error.accepted) from None


def _same_path(function: Any) -> Any:
    """Serve takes a dot for the colon, too."""
    return POLICY if function == POLICY.replace(":", ".") else function


def _refuse_unknown(where: str, given: Mapping[str, Any], known: Any) -> None:
    for key in given:
        if key not in known:
            raise UnknownKey(where, str(key), known)
