"""The calls that a model may write, as a structure: forced, or held to their schemas wherever one begins.

Knows the format of calls that `tool_calls.py` reads, and the functions; knows neither fields nor tokens.

    required    call+                     auto    text up to a call's tag, call, text ... text
    single      call                      auto, an answer has a structure of its own    call+ | answer
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cache.structure import Structure, StructureKind
from router.errors import InvalidField
from router.limits import Limits
from router.openai_api.structures import schema_structure
from router.openai_api.tool_calls import CLOSE, OPEN
from router.openai_api.tools import Tool

# Of a function that says nothing of its parameters: the API's meaning of that.
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_SPACE = r"/[ \t\n\r]{1,32}/"  # between a call's parts: as little or as much as between those of any JSON
_ANY_TEXT = r"(.|\n)*"


@dataclass(frozen=True, slots=True)
class CallRules:
    """How often functions are called, and what may stand beside the calls."""

    is_required: bool  # False: the model decides
    is_single: bool  # at most one call
    answer: Structure | None = None  # what an answer without calls has to be; None = any text


def arguments_of(tool: Tool, at: str, limits: Limits) -> Structure:
    """What its arguments have to be: an object of its schema, and to the letter if it is strict.

    at: the tool's place in the body. Raises InvalidField.
    """
    at = f"{at}.function.parameters"
    schema = _NO_PARAMETERS if tool.parameters is None else tool.parameters
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidField(at, f"'{at}' must be a schema of objects: arguments have names.")
    return schema_structure({**schema, "type": "object"}, at, limits, is_lenient=not tool.is_strict)


def calls_of(functions: Sequence[tuple[str, Structure]], rules: CallRules) -> Structure:
    """Answers whose calls name one of the functions and have its arguments.

    functions: names and what `arguments_of` says; at least one.
    """
    lines = [f"start: {_start(rules)}"]
    if rules.answer is not None:
        lines.append(f"answer: {rules.answer.as_rule()}")
    lines += [
        f"call: {json.dumps(OPEN)} body",
        f"up_to_call[lazy]: /{_ANY_TEXT}{OPEN}/",
        'body: _space? "{" _space? "\\"name\\"" _space? ":" _space? function _space? "}" _space? '
        + json.dumps(CLOSE),
        "function: " + " | ".join(f"function_{index}" for index in range(len(functions))),
    ]
    for index, (name, arguments) in enumerate(functions):
        named = json.dumps(json.dumps(name))
        lines.append(
            f'function_{index}: {named} _space? "," _space? "\\"arguments\\"" _space? ":" _space? '
            f"arguments_{index}"
        )
        lines.append(f"arguments_{index}: {arguments.as_rule()}")
    lines += [f"_space: {_SPACE}", f"text: /{_ANY_TEXT}/"]
    return Structure(StructureKind.GRAMMAR, "\n".join(lines))


def _start(rules: CallRules) -> str:
    # A line's end after a call need not mean that another one comes.
    calls = "call" if rules.is_single else "call (_space? call)* _space?"
    if rules.is_required:
        return calls
    if rules.answer is not None:
        return f"{calls} | answer"
    return "up_to_call body | text" if rules.is_single else "(up_to_call body)* text"
