"""Which policies to compare: `expected_time+late:near_tie=0.1` on the command line, a value everywhere else.

    name                 dispatched at once; engines compute prompts in the order in which they come
    name+late            held by the Router
    name+shortest        at once; engines compute the shortest prompts first, and longer ones stand back
    name+late+shortest   both: as the default policy ships

Knows names and knobs, as production's registry and the Router's settings have them; knows no cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_type_hints

from cache.errors import ConfigError
from cache.scheduling_order import SchedulingOrder
from loadtest.placement.errors import BadRequest
from loadtest.simulation.cell import IDEAL, IDEAL_APART, IDEAL_SHORTEST, IDEALS
from loadtest.simulation.machine import Machine
from loadtest.simulation.turns import fingerprint
from router.config import RouterConfig
from router.policies import POLICIES

DEFAULT = "expected_time"
ALL = "all"
LATE = "late"
SHORTEST = "shortest"
AT_ONCE = "at_once"

# Of the Router's settings those that can change where or when a request goes.
ROUTER_KNOBS = ("hold_backlog_s", "hold_window", "hold_aging", "hold_age_floor_s", "predicted_ttl_s")

Options = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True, order=True)
class PolicyChoice:
    """A policy with the knobs that differ from its defaults, sorted by name.

    Requests are dispatched at once unless late binding is asked for, whatever the Router's own default:
    rivals do not hold requests.
    """

    name: str
    is_late: bool = False
    options: Options = ()  # the policy's
    router_options: Options = ()  # of `ROUTER_KNOBS`
    is_shortest_first: bool = False  # on engines that compute short prompts first, as they ship

    @property
    def label(self) -> str:
        knobs = ",".join(f"{key}={_shown(value)}" for key, value in (*self.options, *self.router_options))
        name = f"{self.name}+{LATE}" if self.is_late else self.name
        name = f"{name}+{SHORTEST}" if self.is_shortest_first else name
        return f"{name}:{knobs}" if knobs else name

    @property
    def is_ideal(self) -> bool:
        """It knows the engines from inside: to compare with, nothing to run."""
        return self.name in IDEALS

    @property
    def engine_order(self) -> SchedulingOrder | None:
        """What it asks of engines; None: what the comparison's machine has."""
        return SchedulingOrder.SHORTEST_PREEMPTING if self.is_shortest_first else None

    def machine_of(self, machine: Machine) -> Machine:
        """The comparison's machine, with engines in the order that it asks for."""
        if self.engine_order is None:
            return machine
        return replace(machine, scheduling_order=self.engine_order)

    @property
    def router_settings(self) -> Options:
        """Fields of `RouterConfig`, sorted by name; none for an ideal, which has no router."""
        if self.is_ideal:
            return ()
        return tuple(sorted((("binding", LATE if self.is_late else AT_ONCE), *self.router_options)))


SHIPPED = PolicyChoice(DEFAULT, is_late=True, is_shortest_first=True)

OURS = (
    PolicyChoice(DEFAULT),
    PolicyChoice(DEFAULT, is_shortest_first=True),
    PolicyChoice(DEFAULT, is_late=True),
    SHIPPED,
)
"""The forms of the default policy: at once and late, each to engines like everybody's and as they ship."""


def parse_policies(texts: Sequence[str]) -> list[PolicyChoice]:
    """`name`, `name+late`, `name+shortest` or `name:knob=value,...`, each.

    `all` stands for every policy at its defaults, the default policy in its other three forms, and the ideals
    but `ideal_apart_shortest`, which takes minutes a cell on many replicas. The ideal is always among them,
    first, since all others are measured against it. No choice comes twice.
    `@file` stands for the choices in a file, one a line, blank lines and `#` comments left out. Raises
    BadRequest for an unknown policy or knob, listing those there are, and for a value it cannot take; in a
    file with its line.
    """
    chosen = [PolicyChoice(IDEAL)]
    for text in texts:
        chosen += [choice for choice in _choices(text) if choice not in chosen]
    return chosen


def parse_policy(text: str) -> PolicyChoice:
    """One policy and its knobs. Raises BadRequest as `parse_policies`, and for `all` and `@file`."""
    if text == ALL or text.startswith("@"):
        raise BadRequest(f"one policy is wanted here, not {text!r}")
    return _parse(text)


def _choices(text: str) -> list[PolicyChoice]:
    if text == ALL:
        return _everybody()
    return _of_file(text[1:]) if text.startswith("@") else [_parse(text)]


def _everybody() -> list[PolicyChoice]:
    rivals = [PolicyChoice(name) for name in POLICIES if name != DEFAULT]
    return [*map(PolicyChoice, (IDEAL, IDEAL_SHORTEST, IDEAL_APART)), *OURS, *rivals]


def _of_file(path: str) -> list[PolicyChoice]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadRequest(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadRequest(f"{path}: not UTF-8 text at byte {error.start}: {error.reason}") from None
    found = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if line and not line.startswith("#"):
            try:
                found.append(_parse(line))
            except BadRequest as error:
                raise BadRequest(f"{path}, line {number}: {error}") from None
    return found


def _parse(text: str) -> PolicyChoice:
    head, _, knobs = text.partition(":")
    name, *forms = head.split("+")
    if name not in POLICIES and name not in IDEALS:
        raise BadRequest(f"unknown policy {name!r}; there are: {', '.join((*POLICIES, *IDEALS, ALL))}")
    if forms not in ([], [LATE], [SHORTEST], [LATE, SHORTEST]) or (forms and name in IDEALS):
        raise BadRequest(
            f"{head!r}: only '+{LATE}' and '+{SHORTEST}' may follow a policy's name, and no ideal's"
        )
    found = [_knob(name, part) for part in knobs.split(",")] if knobs else []
    keys = [key for key, _ in found]
    for key in keys:
        if keys.count(key) > 1:
            raise BadRequest(f"{text!r} gives {key!r} twice")
    choice = PolicyChoice(
        name,
        is_late=LATE in forms,
        is_shortest_first=SHORTEST in forms,
        options=tuple(sorted((key, value) for key, value in found if key not in ROUTER_KNOBS)),
        router_options=tuple(sorted((key, value) for key, value in found if key in ROUTER_KNOBS)),
    )
    if not choice.is_ideal:
        _check(choice)
    return choice


def _knob(policy: str, text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    known: Mapping[str, object] = {}
    if policy in POLICIES:
        router_types = get_type_hints(RouterConfig)
        known = {
            **get_type_hints(POLICIES[policy].options_type),
            **{name: router_types[name] for name in ROUTER_KNOBS},
        }
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


def _check(choice: PolicyChoice) -> None:
    """As a Router would check it."""
    try:
        RouterConfig(
            model_name="simulated",
            tokenizer="simulated",
            fingerprint=fingerprint(1),
            policy=choice.name,
            policy_options=dict(choice.options),
            **dict(choice.router_settings),  # type: ignore[arg-type]
        )
    except ConfigError as error:
        raise BadRequest(str(error)) from error


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
