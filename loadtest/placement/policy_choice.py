"""Which policies to compare: `expected_time:near_tie=0.1` on the command line, a value everywhere else.

Knows names and knobs, as production's registry has them; knows no cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_type_hints

from cache.errors import ConfigError
from loadtest.placement.errors import BadRequest
from loadtest.simulation.cell import IDEAL, IDEALS
from router.policies import POLICIES, check_policy

DEFAULT = "expected_time"
ALL = "all"


@dataclass(frozen=True, slots=True, order=True)
class PolicyChoice:
    """A policy with the knobs that differ from its defaults, sorted by name."""

    name: str
    options: tuple[tuple[str, object], ...] = ()

    @property
    def label(self) -> str:
        knobs = ",".join(f"{key}={_shown(value)}" for key, value in self.options)
        return f"{self.name}:{knobs}" if knobs else self.name

    @property
    def is_ideal(self) -> bool:
        """It sees one pooled cache: a bound to compare with, nothing to run."""
        return self.name in IDEALS


def parse_policies(texts: Sequence[str]) -> list[PolicyChoice]:
    """`name` or `name:knob=value,...`, each; `all` stands for every policy at its defaults, and the ideals.

    The ideal is always among them, first, since all others are measured against it. No choice comes twice.
    Raises BadRequest for an unknown policy or knob, listing those there are, and for a value it cannot take.
    """
    chosen = [PolicyChoice(IDEAL)]
    for text in texts:
        found = [PolicyChoice(name) for name in (*IDEALS, *POLICIES)] if text == ALL else [_parse(text)]
        chosen += [choice for choice in found if choice not in chosen]
    return chosen


def _parse(text: str) -> PolicyChoice:
    name, _, knobs = text.partition(":")
    if name not in POLICIES and name not in IDEALS:
        raise BadRequest(f"unknown policy {name!r}; there are: {', '.join((*POLICIES, *IDEALS, ALL))}")
    options = dict(_knob(name, part) for part in knobs.split(",")) if knobs else {}
    if name in POLICIES:
        _check(name, options)
    return PolicyChoice(name, tuple(sorted(options.items())))


def _knob(policy: str, text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    known: Mapping[str, object] = get_type_hints(POLICIES[policy].options_type) if policy in POLICIES else {}
    if key not in known:
        raise BadRequest(f"{policy} has no knob {key!r}; it has: {', '.join(known) or 'none'}")
    if not equals:
        raise BadRequest(f"{policy}: write {key}=value")
    return key, _value(policy, key, value, known[key])


def _value(policy: str, key: str, text: str, wanted: object) -> object:
    """The text as the knob's type."""
    try:
        if wanted is bool:
            return {"true": True, "false": False}[text.lower()]
        if wanted is int:
            return int(text)
        return float(text) if wanted is float else text
    except (KeyError, ValueError):
        kind = "true or false" if wanted is bool else "a whole number" if wanted is int else "a number"
        raise BadRequest(f"{policy}: {key} must be {kind}, not {text!r}") from None


def _check(name: str, options: Mapping[str, object]) -> None:
    try:
        check_policy(name, options)
    except ConfigError as error:
        raise BadRequest(str(error)) from error


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
