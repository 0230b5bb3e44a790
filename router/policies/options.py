"""A policy's knobs: a frozen dataclass of numbers and switches, read from a plain mapping and checked.

Knows dataclasses; knows no policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, get_type_hints

from cache.errors import ConfigError
from router.policies.base import Policy, PolicyContext


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Of a policy without knobs."""


class _PolicyType(Protocol):
    @property
    def name(self) -> str: ...

    def __call__(self, context: PolicyContext, options: Any) -> Policy: ...


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy's class and the dataclass of its options; every option has a default.

    `options_type.__post_init__` raises ConfigError, through `check_range`, for values out of range.
    """

    policy_type: _PolicyType
    options_type: type[Any] = NoOptions

    @property
    def name(self) -> str:
        return self.policy_type.name

    @property
    def option_names(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self.options_type))

    def build(self, context: PolicyContext, options: object) -> Policy:
        return self.policy_type(context, options)


def read_options(spec: PolicySpec, options: Mapping[str, object]) -> object:
    """The options, checked. Raises ConfigError naming the option and what it may be."""
    types = get_type_hints(spec.options_type)
    for name, value in options.items():
        if name not in types:
            known = ", ".join(spec.option_names) or "none"
            raise ConfigError(f"policy_options.{name}", value, f"{spec.name} has these options: {known}")
        if not _is_a(value, types[name]):
            raise ConfigError(f"policy_options.{name}", value, f"must be {_called(types[name])}")
    return spec.options_type(**options)


def check_range(options: object, **ranges: tuple[float, float]) -> None:
    """Each named option lies within its range, ends included. Raises ConfigError."""
    for name, (low, high) in ranges.items():
        value = getattr(options, name)
        if not low <= value <= high:
            raise ConfigError(f"policy_options.{name}", value, f"must be between {low} and {high}")


def _is_a(value: object, wanted: object) -> bool:
    if wanted is float:
        return type(value) in (int, float) and not math.isnan(value)  # type: ignore[arg-type]
    return type(value) is wanted


def _called(wanted: object) -> str:
    names: dict[object, str] = {
        float: "a number",
        int: "a whole number",
        bool: "true or false",
        str: "a text",
    }
    return names.get(wanted, str(wanted))
