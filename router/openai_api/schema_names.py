"""Records whose names are of a choice, as objects with these properties.

llguidance 1.9 refuses `propertyNames`, so

    {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": VALUES}    becomes
    {"properties": {"a": {"$ref": "#/$defs/values-0"}, "b": ...}, "additionalProperties": false}

and VALUES a definition: copied, records in records would grow by each other's names. `patternProperties`
would need no copies, but lets a comma pass once all names have come, and no text goes on from there.
So Pydantic writes a dictionary by an `Enum` (with a `$ref` to it) or `Literal`, and Zod a record by `z.enum`.
Bounds on how many there are stand against it: of properties they are not enforced, or refused.
Knows these keywords; knows neither where parts are nor what else is in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from urllib.parse import unquote

SAYING_NOTHING = frozenset({"type", "title", "description"})
"""What may stand beside what is asked of names: `type` is that of all names, a string."""

MAX_NAMES = 500
"""Of all records together: of more, `GrammarLimits.max_items_in_row` would be passed."""

_DEFINITION = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
_VALUES = "#/$defs/values-"


@dataclass(frozen=True, slots=True)
class _Choice:
    names: list[str]
    num_bytes: int  # of all names as JSON


class Records:
    """Those of one schema that can be written so. Changes nothing before it is told to."""

    def __init__(self, schemas: Sequence[dict[str, Any]], whole: dict[str, Any]) -> None:
        """schemas: the whole one, and all in it."""
        self._whole = whole
        self._choices: dict[int, _Choice | None] = {}  # by list: one definition may be that of many records
        self._found = [] if _are_bound(schemas, whole) else list(self._in(schemas))

    @property
    def num_names(self) -> int:
        return sum(len(choice.names) for _, choice in self._found)

    @property
    def least_bytes(self) -> int:
        """That their names alone would take, each wherever it has to be written."""
        return sum(choice.num_bytes for _, choice in self._found)

    def write_out(self) -> None:
        """Changes them, and the definitions of the whole schema."""
        if not self._found:
            return
        definitions = self._whole.setdefault("$defs", {})
        free = (name for name in map("values-{}".format, count()) if name not in definitions)
        for schema, choice in self._found:
            place = next(free)
            del schema["propertyNames"]
            definitions[place] = schema.pop("additionalProperties", True)
            schema["properties"] = {name: {"$ref": f"#/$defs/{place}"} for name in choice.names}
            schema["additionalProperties"] = False

    def _in(self, schemas: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], _Choice]]:
        if not isinstance(self._whole.get("$defs", {}), dict):
            return
        for schema in schemas:
            if "propertyNames" not in schema or not schema.keys().isdisjoint(_STANDING_AGAINST):
                continue
            if schema.get("minProperties", 0) not in (0, 1) or schema.get("additionalProperties") is False:
                continue
            choice = self._choice(_defined(schema["propertyNames"], self._whole))
            if choice is not None:
                yield schema, choice

    def _choice(self, names: object) -> _Choice | None:
        """None for what is no choice of strings."""
        if not isinstance(names, dict) or names.get("type", "string") != "string":
            return None
        asked = names.keys() - SAYING_NOTHING
        found = names["enum"] if asked == {"enum"} else [names["const"]] if asked == {"const"} else []
        key = id(names)  # which stays as long as the schema
        if key not in self._choices:
            is_choice = isinstance(found, list) and found and all(isinstance(each, str) for each in found)
            self._choices[key] = _Choice(found, _num_bytes(found)) if is_choice else None
        return self._choices[key]


_STANDING_AGAINST = frozenset({"properties", "patternProperties", "maxProperties"})


def is_written_here(schema: object) -> bool:
    """Whether a schema is that of a name which `Records` wrote."""
    return isinstance(schema, dict) and str(schema.get("$ref", "")).startswith(_VALUES)


def _are_bound(schemas: Sequence[dict[str, Any]], whole: dict[str, Any]) -> bool:
    """Whether a reference may lead into what would be moved, or be read from elsewhere than the whole one."""
    if any("$id" in schema for schema in schemas if schema is not whole):
        return True
    references = (unquote(schema["$ref"]) for schema in schemas if isinstance(schema.get("$ref"), str))
    return any("/additionalProperties" in each or "/propertyNames" in each for each in references)


def _num_bytes(names: list[str]) -> int:
    return len(json.dumps(names, ensure_ascii=False, separators=(",", ":")).encode())


def _defined(names: object, whole: dict[str, Any]) -> object:
    """What a reference to a definition stands for; what is no such reference stays as it is."""
    if not isinstance(names, dict) or names.keys() - SAYING_NOTHING != {"$ref"}:
        return names
    place = _DEFINITION.fullmatch(names["$ref"]) if isinstance(names["$ref"], str) else None
    definitions = whole.get(place[1]) if place else None
    return definitions.get(place[2]) if place and isinstance(definitions, dict) else None
