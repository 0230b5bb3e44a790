"""Settings of the Routers alone as a file has them: YAML in the environment of its Routers.

Reads text and mappings, and knows which settings have settings of their own; knows neither Ray nor ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import yaml

from cache.errors import HIDDEN, ConfigError
from deploy import strict_yaml
from deploy.config import section_of
from router.config import RouterConfig

ROUTER_VARIABLE = "WARMPATH_ROUTER"


def settings_in(text: str, where: str = ROUTER_VARIABLE) -> Mapping[str, Any]:
    """What the variable says. Raises ConfigError with `where` for its name."""
    try:
        settings = strict_yaml.load(text)
    except yaml.YAMLError as error:
        # Its own text shows the line, and a debug_token may be in it.
        place = getattr(error, "problem_mark", None)
        line = "" if place is None else f", line {place.line + 1}"
        problem = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(where, HIDDEN, f"must be YAML: {problem}{line}") from None
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise ConfigError(where, HIDDEN, "must be a mapping of settings, as args.router is")
    return settings


def folded(
    settings: Mapping[str, Any], over: Mapping[str, Any], kind: type[Any] = RouterConfig
) -> dict[str, Any]:
    """A file's `args.router` with the variable's settings in it, as a Router lays them over it."""
    hints = get_type_hints(kind)
    result = dict(settings)
    for key, value in over.items():
        section, base = section_of(hints.get(key)), result.get(key)
        if section is not None and isinstance(value, Mapping) and isinstance(base, Mapping):
            value = folded(base, value, section)
        result[key] = value
    return result
