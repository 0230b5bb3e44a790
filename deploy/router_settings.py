"""Settings of the Routers alone, laid over `args.router` where a Router starts: YAML in its environment.

For any change of an application's `args` Serve replaces all its deployments, and one deployment alone where
that one's environment has changed (docs/design/001-serving-on-ray.md). So what stands in WARMPATH_ROUTER can
change while replicas run on, with all that they have cached.
Knows settings; starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from cache.errors import ConfigError
from cache.fingerprint import HashAlgorithm
from deploy.agreement import check_settings
from deploy.config import ROUTER_KEYS_FROM_DEPLOY, AppConfig, converted, refuse_unknown
from deploy.router_variable import ROUTER_VARIABLE, settings_in
from deploy.traces import check_exporter
from replica.config import ReplicaConfig
from router.config import RouterConfig

_ARGS = "args.router."


def laid_over(
    config: RouterConfig, text: str, replica: ReplicaConfig, where: str = ROUTER_VARIABLE
) -> RouterConfig:
    """`config` with these settings in place of its own; of a section, such as `limits`, those that are given.

    text: a mapping like `args.router`. replica: what has to go with them. Raises ConfigError or UnknownKey,
    which name a setting by its place below `where`.
    """
    settings = settings_in(text, where)
    refuse_unknown(where, settings, _names(config) - ROUTER_KEYS_FROM_DEPLOY)
    changed: RouterConfig = _changed(config, settings, where, where)
    check_exporter(changed.traces, f"{where}.traces")
    _check_names(config, changed, where)
    try:
        check_settings(changed, replica)
    except ConfigError as error:
        name = error.field.removeprefix(_ARGS)
        raise ConfigError(
            f"{where}.{name}" if name in settings else error.field, error.value, error.accepted
        ) from None
    return changed


def over_app(app: AppConfig, text: str, where: str) -> AppConfig:
    """The whole deployment's settings as they are then. Raises as `laid_over` does."""
    changed = laid_over(app.router_sketch(), text, app.replica, where)
    names = _names(changed) - ROUTER_KEYS_FROM_DEPLOY
    return replace(app, router={name: getattr(changed, name) for name in names})


def _changed(base: Any, settings: Mapping[str, Any], where: str, top: str) -> Any:
    """`base` with these as its fields' types; a section's own laid over it. where: `base` is, below `top`."""
    refuse_unknown(where, settings, _names(base))
    values: dict[str, Any] = {}
    for key, value in settings.items():
        section = getattr(base, key)
        if is_dataclass(section) and isinstance(value, Mapping):
            values[key] = _changed(section, value, f"{where}.{key}", top)
        else:
            values |= converted(where, {key: value}, type(base))
    try:
        return replace(base, **values)
    except ConfigError as error:  # a section checks itself, and names its fields from its owner's place on
        raise ConfigError(f"{top}.{error.field}", error.value, error.accepted) from None


def _check_names(config: RouterConfig, changed: RouterConfig, where: str) -> None:
    """How blocks are named is the replicas' too, and follows from whether there are keys in `args`."""
    is_new = changed.tenants.has_keys and not config.tenants.has_keys
    if is_new and config.fingerprint.hash_algorithm is not HashAlgorithm.SHA256:
        name = "keys_file" if changed.tenants.keys_file is not None else "keys_variable"
        needed = "must be in args.router, or args.replica.hash_algorithm sha256: where there are keys it is"
        raise ConfigError(f"{where}.tenants.{name}", getattr(changed.tenants, name), needed)


def _names(settings: Any) -> set[str]:
    return {each.name for each in fields(settings)}
