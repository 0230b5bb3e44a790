"""What may be written on the command line: lists, sizes, events of a fleet. Knows argparse; runs nothing.

Every reader raises argparse.ArgumentTypeError, which names what was wrong and what would be right.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TypeVar

from loadtest.simulation.cell import Failure, Scaling
from loadtest.simulation.machine import H100_8B, Machine, SharedMachine
from loadtest.workloads.errors import WorkloadError
from loadtest.workloads.generators import make_generator
from loadtest.workloads.reference import WorkloadRef

T = TypeVar("T")

ORDER = "scheduling_order"  # of a machine: no number
_SIZES = {"k": 1_000, "m": 1_000_000}


def list_of(one: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """`1.5,1,1`: at least one."""

    def read(text: str) -> tuple[T, ...]:
        return tuple(one(part) for part in text.split(","))

    return read


def different(one: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """`4,16,64`: at least one, none twice."""

    def read(text: str) -> tuple[T, ...]:
        values = list_of(one)(text)
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text!r} names a value twice")
        return values

    return read


def count(text: str) -> int:
    """A whole number from 1."""
    return _whole(text, 1)


def several(text: str) -> int:
    """A whole number from 2."""
    return _whole(text, 2)


def whole(text: str) -> int:
    """A whole number from 0."""
    return _whole(text, 0)


def load(text: str) -> float:
    return _number(text, above=0.0)


def seconds(text: str) -> float:
    return _number(text, least=0.0)


def positive_seconds(text: str) -> float:
    return _number(text, above=0.0)


def share(text: str) -> float:
    """From 0, below 1."""
    return _number(text, least=0.0, below=1.0)


def seeds(text: str) -> tuple[int, ...]:
    """`0,1,2` or `0-4`."""
    first, dash, last = text.partition("-")
    if dash:
        found = tuple(range(_whole(first, 0), _whole(last, 0) + 1))
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is an empty range")
        return found
    return different(whole)(text)


def tokens(text: str) -> int:
    """`400k`, `1.5M` or a whole number, from 1."""
    factor = _SIZES.get(text[-1:].lower(), 1)
    value = _number(text[:-1] if factor > 1 else text, above=0.0) * factor
    if value < 1 or value != round(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, such as 400k or 1.5M")
    return int(value)


def generator(text: str) -> WorkloadRef:
    """`multi_turn` or `multi_turn:turns=8,think_s=10`."""
    name, _, knobs = text.partition(":")
    parameters = _assignments(knobs) if knobs else {}
    try:
        make_generator(name, parameters)
    except WorkloadError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return WorkloadRef(name, tuple(sorted(parameters.items())))


def trace(text: str) -> WorkloadRef:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return WorkloadRef.of_file(path)


def failure(text: str) -> Failure:
    """`60:2` or `60:2:10`: at second 60 the third replica dies, and another takes its place 10 s later."""
    parts = text.split(":")
    if len(parts) not in (2, 3):
        raise argparse.ArgumentTypeError(f"{text!r} is not SECOND:REPLICA or SECOND:REPLICA:DOWN_SECONDS")
    down_s = _number(parts[2], above=0.0) if len(parts) == 3 else math.inf
    return Failure(_number(parts[0], least=0.0), _whole(parts[1], 0), down_s)


def scaling(text: str) -> Scaling:
    """`60:8`: from second 60 on there are 8 replicas."""
    at, colon, size = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not SECOND:REPLICAS")
    return Scaling(_number(at, least=0.0), _whole(size, 1))


def machine(text: str) -> Machine:
    """`per_token_s=4e-5,max_batched_tokens=2048`: the default machine, but for these. With `num_engines=2`
    all replicas share it.

    Its numbers alone: in which order engines compute is asked for with a policy, as NAME+shortest.
    """
    kinds = {field.name: field.type for field in fields(SharedMachine) if field.name != ORDER}
    if any(part.partition("=")[0] == ORDER for part in text.split(",")):
        raise argparse.ArgumentTypeError(
            f"{ORDER!r} is asked for with the policy, NAME+shortest; constants are: {', '.join(kinds)}"
        )
    changes = _assignments(text)
    for name, value in changes.items():
        if name not in kinds:
            raise argparse.ArgumentTypeError(f"unknown constant {name!r}; there are: {', '.join(kinds)}")
        if kinds[name] == "int":
            if value != int(value):
                raise argparse.ArgumentTypeError(f"{name} must be a whole number, not {value:g}")
            changes[name] = int(value)
    try:
        if "num_engines" in changes:
            return SharedMachine(**{**asdict(H100_8B), **changes})
        return replace(H100_8B, **changes)  # type: ignore[arg-type]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _assignments(text: str) -> dict[str, float]:
    """`a=1,b=2`, none twice."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, value = _assignment(part)
        if name in found:
            raise argparse.ArgumentTypeError(f"{text!r} gives {name!r} twice")
        found[name] = value
    return found


def _assignment(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not name=value")
    return name, _number(value)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is below {least}")
    return value


def _number(
    text: str, *, least: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is below {least:g}")
    if value <= above:
        raise argparse.ArgumentTypeError(f"{text} is not above {above:g}")
    if value >= below:
        raise argparse.ArgumentTypeError(f"{text} is not below {below:g}")
    return value
