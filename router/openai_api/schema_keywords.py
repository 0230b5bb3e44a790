"""Keywords of a schema that need not be followed, taken out: llguidance 1.9 refuses the schema for them.

    propertyNames {"type": "string"}    asks for nothing: all names are strings. Zod's records have it
    propertyNames, and no name may be   likewise: additionalProperties false beside it, and no properties
    pattern ^(?!x).*$, \\bx, (a)\\1       cannot be followed: left out of account where a schema is lenient
    patternProperties {"^(?!x)": ...}   likewise, with the additionalProperties that would count for those

Knows these keywords; knows neither where parts are nor what else is in them.
"""

from __future__ import annotations

import re
from typing import Any

from router.openai_api.schema_names import SAYING_NOTHING

# Escapes and classes first, in which nothing has a meaning of its own; the only group is what cannot be
# followed. Possessive: an unclosed class would be looked for again from each of its brackets.
_PARTS = re.compile(
    r"(\(\?<?[=!]|\\[1-9bBk]|\(\?P=)|\\(?:.|\Z)|\[\^?(?:\\(?:.|\Z)|[^\]\\])*+(?:\]|\Z)", re.DOTALL
)


def leave_out(schema: dict[str, Any], *, is_lenient: bool) -> None:
    """Changes one schema; those in it are their own."""
    if "propertyNames" in schema and (_has_no_names(schema) or _says_nothing(schema["propertyNames"])):
        del schema["propertyNames"]
    if not is_lenient:
        return
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and _cannot_be_followed(pattern):
        del schema["pattern"]
    if isinstance(schema.get("patternProperties"), dict):
        _leave_out_names(schema)


def _leave_out_names(schema: dict[str, Any]) -> None:
    named = schema["patternProperties"]
    followed = {pattern: each for pattern, each in named.items() if not _cannot_be_followed(pattern)}
    if len(followed) == len(named):
        return
    schema["patternProperties"] = followed
    if not followed:
        del schema["patternProperties"]
    schema.pop("additionalProperties", None)


def _cannot_be_followed(pattern: str) -> bool:
    return any(part[1] for part in _PARTS.finditer(pattern))


def _has_no_names(schema: dict[str, Any]) -> bool:
    return schema.get("additionalProperties") is False and schema.keys().isdisjoint(
        ("properties", "patternProperties")
    )


def _says_nothing(names: object) -> bool:
    if names is True:
        return True
    return (
        isinstance(names, dict) and names.keys() <= SAYING_NOTHING and names.get("type", "string") == "string"
    )
