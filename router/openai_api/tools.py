"""The functions that a model may call, and whether it has to, as checked values.

Knows the API's shape of tools; knows neither how a model writes calls nor what a schema means.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo

from router.errors import InvalidField, UnsupportedParameter
from router.openai_api.checked import limits_of
from router.openai_api.fields import Endpoint, accepted_text

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FUNCTION = "function"


class Tool(BaseModel):
    """One function."""

    model_config = ConfigDict(frozen=True)

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of its arguments, unchecked; None = it takes none
    is_strict: bool = False  # its arguments have to follow the schema

    def for_template(self) -> dict[str, Any]:
        """As chat templates read tools: without what is null, and what is for the server."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": _FUNCTION, "function": function}


class Calling(StrEnum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


class ToolChoice(BaseModel):
    """Whether functions are called, and which."""

    model_config = ConfigDict(frozen=True)

    calling: Calling = Calling.AUTO
    names: tuple[str, ...] | None = None  # that may be called; None = all there are
    is_named: bool = False  # one function by its name: it is called once

    def allows(self, tools: Sequence[Tool]) -> list[tuple[int, Tool]]:
        """The functions that may be called, each with its place in the list."""
        return [
            (index, tool)
            for index, tool in enumerate(tools)
            if self.calling is not Calling.NONE and (self.names is None or tool.name in self.names)
        ]

    def check_against(self, tools: Sequence[Tool]) -> None:
        """Raises InvalidField where what is asked for is not there."""
        if self.calling is Calling.REQUIRED and not tools:
            raise InvalidField(
                "tool_choice", "'tool_choice' can ask for a call only where there are 'tools'."
            )
        names = {tool.name for tool in tools}
        if any(name not in names for name in self.names or ()):
            raise InvalidField("tool_choice", "'tool_choice' names a function that is not in 'tools'.")


def to_tools(value: object, info: ValidationInfo) -> tuple[Tool, ...]:
    """The field `tools`, checked. Raises InvalidField or UnsupportedParameter."""
    limit = limits_of(info).max_tools
    if not isinstance(value, list) or len(value) > limit:
        raise InvalidField("tools", f"'tools' must be a list of at most {limit} functions.")
    return tuple(_to_tool(item, f"tools[{index}]") for index, item in enumerate(value))


def _to_tool(value: object, at: str) -> Tool:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != _FUNCTION:
        raise UnsupportedParameter(
            f"{at}.type", f"'{at}.type' must be \"function\": others are not supported."
        )
    function = value.get(_FUNCTION) if isinstance(value, dict) else None
    if kind is None or not isinstance(function, dict):
        raise InvalidField(at, f"'{at}' must be an object with type \"function\" and a 'function'.")
    at = f"{at}.function"
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise InvalidField(
            f"{at}.name", f"'{at}.name' must have 1 to 64 letters, digits, underscores, dots or dashes."
        )
    for part, expected, text in (
        ("description", str, "a string"),
        ("parameters", dict, "an object"),
        ("strict", bool, "true or false"),
    ):
        if function.get(part) is not None and not isinstance(function[part], expected):
            raise InvalidField(f"{at}.{part}", f"'{at}.{part}' must be {text}.")
    return Tool.model_construct(
        name=name,
        description=function.get("description"),
        parameters=function.get("parameters"),
        is_strict=function.get("strict") or False,
    )


def to_tool_choice(value: object) -> ToolChoice:
    """The field `tool_choice`, checked. Raises InvalidField or UnsupportedParameter."""
    if isinstance(value, str) and value in tuple(Calling):
        return ToolChoice.model_construct(calling=Calling(value))
    match value:
        case {"type": "function"}:
            return ToolChoice.model_construct(
                calling=Calling.REQUIRED, names=(_named(value, "tool_choice"),), is_named=True
            )
        case {"type": "allowed_tools"}:
            return _to_allowed(value)
        case {"type": "custom"}:
            raise UnsupportedParameter(
                "tool_choice", "'tool_choice' can name functions: other tools are not supported."
            )
    raise InvalidField("tool_choice", f"'tool_choice' must be {accepted_text(Endpoint.CHAT, 'tool_choice')}.")


def _to_allowed(value: object) -> ToolChoice:
    at = "tool_choice.allowed_tools"
    match value:
        case {"allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}} if tools:
            names = tuple(_named(tool, f"{at}.tools[{index}]") for index, tool in enumerate(tools))
            return ToolChoice.model_construct(calling=Calling(mode), names=names)
    raise InvalidField(
        at,
        f"'{at}' must be an object with the mode \"auto\" or \"required\" and a non-empty list of 'tools'.",
    )


def _named(value: object, at: str) -> str:
    match value:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise InvalidField(at, f"'{at}' must be an object with type \"function\" and a function's name.")


TOOLS_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "pattern": f"^{_TOOL_NAME.pattern}$"},
                    "description": {"type": "string"},
                    "parameters": {"type": "object"},
                    "strict": {"type": "boolean"},
                },
            },
        },
    },
}
_NAMED_SCHEMA = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    },
}
TOOL_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": [each.value for each in Calling]},
        _NAMED_SCHEMA,
        {
            "type": "object",
            "required": ["type", "allowed_tools"],
            "properties": {
                "type": {"const": "allowed_tools"},
                "allowed_tools": {
                    "type": "object",
                    "required": ["mode", "tools"],
                    "properties": {
                        "mode": {"enum": ["auto", "required"]},
                        "tools": {"type": "array", "minItems": 1, "items": _NAMED_SCHEMA},
                    },
                },
            },
        },
    ]
}
