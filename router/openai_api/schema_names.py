"""Records whose names are of a choice, as objects with these properties.

llguidance 1.9 refuses `propertyNames`, so

    {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": VALUES}    becomes
    {"properties": {"a": {"$ref": "#/$defs/values-0"}, "b": ...}, "additionalProperties": false}

and VALUES a definition: copied, records in records would grow by each other's names. `patternProperties`
would need no copies, but lets a comma pass once all names have come, and no text goes on from there.
So Pydantic writes a dictionary by an `Enum` (with a `$ref` to it) or `Literal`, and Zod a record by `z.enum`.
Knows these keywords; knows neither where parts are nor what else is in them.
"""

from __future__ import annotations

import re
from itertools import count
from typing import Any

SAYING_NOTHING = frozenset({"type", "title", "description"})
"""What may stand beside what is asked of names: `type` is that of all names, a string."""

_DEFINITION = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")


def follow_names(schema: dict[str, Any], whole: dict[str, Any]) -> None:
    """Changes one schema, and the definitions of the whole one; those in it are their own.

    whole: the schema that it is a part of, or itself.
    """
    if "propertyNames" not in schema or "properties" in schema or "patternProperties" in schema:
        return
    names = _choice(_defined(schema["propertyNames"], whole))
    definitions = whole.get("$defs", {})
    if not names or not isinstance(definitions, dict):
        return
    del schema["propertyNames"]
    place = next(name for name in map("values-{}".format, count(len(definitions))) if name not in definitions)
    definitions[place] = schema.pop("additionalProperties", True)
    whole["$defs"] = definitions
    schema["properties"] = {name: {"$ref": f"#/$defs/{place}"} for name in names}
    schema["additionalProperties"] = False


def _defined(names: object, whole: dict[str, Any]) -> object:
    """What a reference to a definition stands for; what is no such reference stays as it is."""
    if not isinstance(names, dict) or names.keys() - SAYING_NOTHING != {"$ref"}:
        return names
    place = _DEFINITION.fullmatch(names["$ref"]) if isinstance(names["$ref"], str) else None
    definitions = whole.get(place[1]) if place else None
    return definitions.get(place[2]) if place and isinstance(definitions, dict) else None


def _choice(names: object) -> list[str]:
    """The names that there may be; none where that is no choice of strings."""
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return []
    asked = names.keys() - SAYING_NOTHING
    found = names["enum"] if asked == {"enum"} else [names["const"]] if asked == {"const"} else []
    return found if isinstance(found, list) and all(isinstance(each, str) for each in found) else []
