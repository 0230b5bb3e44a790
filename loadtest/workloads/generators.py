"""Synthetic traffic by name: what a fleet may meet beside the published traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields

from loadtest.workloads.dialogues import AgentLoops, DecodeHeavy, MultiTurn
from loadtest.workloads.errors import UnknownName, WorkloadError
from loadtest.workloads.generator import Generator
from loadtest.workloads.held_out import HeldOut
from loadtest.workloads.single_prompts import HotPrefix, NoReuse, SystemPrompts

GENERATORS: Mapping[str, type[Generator]] = {
    kind.name: kind
    for kind in (SystemPrompts, MultiTurn, HotPrefix, NoReuse, DecodeHeavy, AgentLoops, HeldOut)
}


def make_generator(name: str, parameters: Mapping[str, float]) -> Generator:
    """The generator of that name, with its defaults for parameters not given.

    Raises UnknownName for a name or parameter that is not there (it lists those that are), WorkloadError
    for a value out of range, or with a fraction where there is none.
    """
    if name not in GENERATORS:
        raise UnknownName("generator", name, GENERATORS)
    kind = GENERATORS[name]
    known = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    for parameter, value in parameters.items():
        if parameter not in known:
            raise UnknownName(f"parameter of {name}", parameter, known)
        if known[parameter] == "int" and value != int(value):
            raise WorkloadError(f"{kind.__name__}: {parameter} = {value:g} is not a whole number")
    build: Callable[..., Generator] = kind
    return build(**{key: int(v) if known[key] == "int" else float(v) for key, v in parameters.items()})
