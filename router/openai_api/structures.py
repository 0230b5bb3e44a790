"""What a body says of the form of its answer, as one `Structure`: the API's names for it, and older ones.

Knows the fields, their types and limits; `structure_verdict.py` finds out whether a grammar can be followed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationInfo

from cache.structure import Structure, StructureKind
from router.errors import InvalidField, UnsupportedParameter
from router.limits import Limits
from router.openai_api.body import strictly_parsed
from router.openai_api.checked import limits_of
from router.openai_api.gbnf import UndefinedRule, is_gbnf, lark_of
from router.openai_api.gbnf_nodes import quoted
from router.openai_api.schema_bounds import make_inclusive
from router.openai_api.schema_keywords import leave_out
from router.openai_api.schema_names import MAX_NAMES, Records

ANY_OBJECT = Structure(StructureKind.JSON_SCHEMA, '{"type": "object"}')

_FORMATS = ("text", "json_object", "json_schema")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SWITCHES = (
    "disable_any_whitespace",
    "disable_additional_properties",
    "disable_fallback",
    "_backend_was_auto",
)
_KINDS = ("json", "regex", "choice", "grammar", "json_object")

# Where JSON Schema has schemas in schemas.
_IN_OBJECTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_DIRECTLY = (
    *("items", "additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems"),
    *("not", "if", "then", "else", "contains", "propertyNames"),
)


def to_format(value: object, info: ValidationInfo) -> Structure | None:
    """`response_format`; None where the text is free. Raises InvalidField."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in _FORMATS:
        quoted = ", ".join(f'"{each}"' for each in _FORMATS)
        raise InvalidField(
            "response_format", f"'response_format' must be an object whose type is one of {quoted}."
        )
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")  # as llama.cpp and others have it, who have no `json_schema`
        if schema is None:
            return ANY_OBJECT
        return schema_structure(schema, "response_format.schema", limits_of(info), is_lenient=True)
    at = "response_format.json_schema"
    named = value.get("json_schema")
    if not isinstance(named, dict):
        raise InvalidField(at, f"'{at}' must be an object with a 'name' and a 'schema'.")
    name, strict = named.get("name"), named.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidField(
            f"{at}.name", f"'{at}.name' must have 1 to 64 letters, digits, underscores or dashes."
        )
    if strict is not None and not isinstance(strict, bool):
        raise InvalidField(f"{at}.strict", f"'{at}.strict' must be true or false.")
    return schema_structure(named.get("schema"), f"{at}.schema", limits_of(info), is_lenient=not strict)


def to_structure(value: object, info: ValidationInfo) -> Structure:
    """`structured_outputs`: an object that names one kind. Raises InvalidField or UnsupportedParameter."""
    at = "structured_outputs"
    given = {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else {}
    for switch in ("json_object", *_SWITCHES):  # vLLM's own object writes them all
        if given.get(switch) is False:
            del given[switch]
    other = next((key for key in given if key not in _KINDS), None)
    if other in ("structural_tag", "whitespace_pattern", *_SWITCHES):
        raise UnsupportedParameter(f"{at}.{other}", f"'{at}.{other}' is not supported by this server.")
    if len(given) != 1 or other is not None:
        raise InvalidField(at, f"'{at}' must be an object with exactly one of {', '.join(_KINDS)}.")
    kind, content = next(iter(given.items()))
    return _KINDS_READ[kind](content, f"{at}.{kind}", limits_of(info))


def to_guided_json(value: object, info: ValidationInfo) -> Structure:
    """Raises InvalidField."""
    return _json(value, "guided_json", limits_of(info))


def to_guided_regex(value: object, info: ValidationInfo) -> Structure:
    """Raises InvalidField."""
    return _regex(value, "guided_regex", limits_of(info))


def to_guided_choice(value: object, info: ValidationInfo) -> Structure:
    """Raises InvalidField."""
    return _choice(value, "guided_choice", limits_of(info))


def to_guided_grammar(value: object, info: ValidationInfo) -> Structure:
    """Raises InvalidField."""
    return _grammar(value, "guided_grammar", limits_of(info))


def _json(value: object, at: str, limits: Limits) -> Structure:
    """A schema, or one in a string."""
    if isinstance(value, str):
        _check_size(value, at, limits)
        try:
            value = strictly_parsed(value.encode())
        except ValueError:
            raise InvalidField(at, f"'{at}' must be a JSON schema, or a string that holds one.") from None
    return schema_structure(value, at, limits, is_lenient=False)


def schema_structure(value: object, at: str, limits: Limits, *, is_lenient: bool) -> Structure:
    """A text that is JSON of this schema. Raises InvalidField, naming the place `at`."""
    if not isinstance(value, dict):
        raise InvalidField(at, f"'{at}' must be a JSON schema: an object.")
    source = _written(value)
    _check_size(source, at, limits)
    limit = limits.max_schema_depth
    deepest = next((part for part in parts(value) if part.depth > limit), None)
    if deepest is not None:
        raise InvalidField(
            at, f"'{at}' must nest schemas at most {limit} deep; at {deepest.shown()} it goes deeper."
        )
    return Structure(StructureKind.JSON_SCHEMA, _as_followed(source, at, limits, is_lenient), is_lenient)


def _written(schema: object) -> str:
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _as_followed(source: str, at: str, limits: Limits, is_lenient: bool) -> str:
    """The schema without what llguidance would let pass, or refuse without need.

    Raises InvalidField where it is too long with names of a definition wherever it is referred to; a lenient
    one is then without them.
    """
    if not any(name in source for name in ('"exclusiveM', '"propertyNames"', '"pattern')):
        return source
    try:
        return _rewritten(source, at, limits, is_lenient, max_names=MAX_NAMES if is_lenient else None)
    except InvalidField:
        if not is_lenient:
            raise
        return _rewritten(source, at, limits, is_lenient, max_names=0)


def _rewritten(source: str, at: str, limits: Limits, is_lenient: bool, *, max_names: int | None) -> str:
    """max_names: of records, to be followed. Raises InvalidField where they make it too long: they are
    counted before any is written.
    """
    schema = json.loads(source)
    schemas = [part.schema for part in parts(schema) if isinstance(part.schema, dict)]
    records = Records(schemas, schema)
    if max_names is None or records.num_names <= max_names:
        _check_names(records.least_bytes, at, limits)
        records.write_out()
    for each in schemas:
        leave_out(each, is_lenient=is_lenient)
    make_inclusive(schemas)
    written = _written(schema)
    _check_size(written, at, limits)
    return written


def _regex(value: object, at: str, limits: Limits) -> Structure:
    if not isinstance(value, str) or not value:
        raise InvalidField(at, f"'{at}' must be a regular expression: a non-empty string.")
    _check_size(value, at, limits)
    return Structure(StructureKind.REGEX, value)


def _choice(value: object, at: str, limits: Limits) -> Structure:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise InvalidField(at, f"'{at}' must be a list of at least one non-empty string.")
    source = "start: " + " | ".join(quoted(each) for each in dict.fromkeys(value))
    _check_size(source, at, limits)
    return Structure(StructureKind.GRAMMAR, source)


def _grammar(value: object, at: str, limits: Limits) -> Structure:
    """Lark, or GBNF."""
    if not isinstance(value, str) or not value.strip():
        raise InvalidField(
            at, f"'{at}' must be a grammar, in Lark's notation or as GBNF: a non-empty string."
        )
    _check_size(value, at, limits)
    if not is_gbnf(value):
        return Structure(StructureKind.GRAMMAR, value)
    try:
        return Structure(StructureKind.GRAMMAR, lark_of(value))
    except UndefinedRule as error:
        raise InvalidField(at, f"'{at}' begins with a rule of GBNF (name ::= ...), and {error}.") from None
    except Exception:  # whatever a converter of text trips over; its messages quote the text
        raise InvalidField(
            at, f"'{at}' begins with a rule of GBNF (name ::= ...), and cannot be read as GBNF."
        ) from None


def _object(value: object, at: str, _limits: Limits) -> Structure:
    if value is not True:
        raise InvalidField(at, f"'{at}' must be true or false.")
    return ANY_OBJECT


_KINDS_READ = {"json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar, "json_object": _object}


def _check_size(source: str, at: str, limits: Limits) -> None:
    limit, size = limits.max_structure_bytes, len(source.encode("utf-8", "surrogatepass"))
    if size > limit:
        raise InvalidField(at, f"'{at}' must have at most {limit} bytes, this one has {size}.")


def _check_names(size: int, at: str, limits: Limits) -> None:
    if size > limits.max_structure_bytes:
        raise InvalidField(
            at,
            f"'{at}' must have at most {limits.max_structure_bytes} bytes, also with the names that its "
            f"'propertyNames' refer to written wherever they may come: these alone have {size}.",
        )


# -- parts of a schema --------------------------------------------------------------------------------


class Part:
    """A schema inside a schema, and where."""

    __slots__ = ("depth", "pointer", "schema")

    def __init__(self, schema: object, pointer: tuple[str, ...], depth: int) -> None:
        self.schema = schema
        self.pointer = pointer
        self.depth = depth  # schemas around it

    def shown(self) -> str:
        """As a JSON pointer, of a length to be read."""
        escaped = [each.replace("~", "~0").replace("/", "~1") for each in self.pointer]
        text = "".join(char if char.isprintable() else "?" for char in "/".join(["#", *escaped]))
        return text if len(text) <= MAX_POINTER_CHARS else "..." + text[-MAX_POINTER_CHARS:]


MAX_POINTER_CHARS = 200


def parts(schema: object) -> Iterator[Part]:
    """The schema and all in it, outermost first. No recursion: it may be as deep as a body may."""
    waiting = [Part(schema, (), 0)]
    for part in waiting:
        yield part
        waiting += inner_parts(part)


def inner_parts(part: Part) -> Iterator[Part]:
    """The schemas directly in it."""
    if not isinstance(part.schema, Mapping):
        return
    for keyword, value in part.schema.items():
        for path, inner in _inner(str(keyword), value):
            yield Part(inner, (*part.pointer, *path), part.depth + 1)


def _inner(keyword: str, value: Any) -> Iterator[tuple[tuple[str, ...], object]]:
    if keyword in _IN_OBJECTS and isinstance(value, dict):
        for name, inner in value.items():
            yield (keyword, name), inner
    elif isinstance(value, list) and (keyword in _IN_LISTS or keyword == "items"):
        for index, inner in enumerate(value):
            yield (keyword, str(index)), inner
    elif keyword in _DIRECTLY and isinstance(value, dict):
        yield (keyword,), value
