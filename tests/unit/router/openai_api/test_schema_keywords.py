"""Keywords that are left out: what they ask for is nothing, or cannot be followed where it need not be."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from router.limits import Limits
from router.openai_api.call_grammar import CallRules, arguments_of, calls_of
from router.openai_api.structure_verdict import Refusal, judge
from router.openai_api.structures import schema_structure
from router.openai_api.tools import Tool

RECORD = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "boolean"}}
# As Zod writes `z.iso.duration()`.
DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"


def _read(schema: dict[str, Any], *, is_lenient: bool = False) -> Any:
    return json.loads(schema_structure(schema, "x", Limits(), is_lenient=is_lenient).source)


def _judged(schema: dict[str, Any], *, is_lenient: bool = False) -> Refusal | None:
    return judge(schema_structure(schema, "x", Limits(), is_lenient=is_lenient))


def test_a_record_is_followed() -> None:
    """As Zod writes `z.record(z.string(), z.boolean())`, which its clients send as strict."""
    outer = {"type": "object", "properties": {"flags": RECORD}, "$defs": {"propertyNames": RECORD}}
    assert _judged(outer) is None
    assert _read(outer)["$defs"]["propertyNames"] == {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
    }
    assert "propertyNames" in RECORD  # the client's own schema, which its prompt may be made of


@pytest.mark.parametrize("names", [True, {}, {"type": "string", "description": "a name", "title": "Name"}])
def test_names_of_which_nothing_is_asked(names: Any) -> None:
    assert _judged({"type": "object", "propertyNames": names}) is None


@pytest.mark.parametrize(
    "names",
    [False, {"pattern": "^a"}, {"type": "string", "maxLength": 3}, {"type": "null"}, {"type": ["string"]}],
)
def test_names_of_which_something_is_asked_are_refused(names: Any) -> None:
    refusal = _judged({"type": "object", "propertyNames": names})
    assert refusal == Refusal("'propertyNames' cannot be enforced", "#")


def test_a_property_of_that_name_is_a_property() -> None:
    schema = {
        "type": "object",
        "properties": {"propertyNames": {"type": "string"}, "pattern": {"const": "(?=x)"}},
        "required": ["propertyNames", "pattern"],
        "enum": [{"pattern": "(?=x)", "propertyNames": {}}],
    }
    assert _read(schema, is_lenient=True) == schema


@pytest.mark.parametrize(
    "pattern",
    [DURATION, "^(?!x)[a-c]{3}$", "(?<=a)b", "(?<!a)b", r"(a)\1", r"\bword\b", r"[\]](?=x)", r"\\\b"],
)
def test_a_pattern_that_cannot_be_followed_counts_where_a_schema_is_strict(pattern: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern, "maxLength": 9}}}
    assert _judged(schema) is not None
    assert _judged(schema, is_lenient=True) is None
    assert _read(schema, is_lenient=True)["properties"]["x"] == {"type": "string", "maxLength": 9}


UNFOLLOWED = [DURATION, "^(?!x)", "(?<=a)b", r"(a)\1", r"\bword\b"]


@pytest.mark.parametrize("name", UNFOLLOWED)
@pytest.mark.parametrize("others", [False, {"type": "integer"}])
def test_names_that_cannot_be_followed_count_where_a_schema_is_strict(name: str, others: Any) -> None:
    """What stands for other names stood for names of that pattern, too, if it were kept without it."""
    schema = {
        "type": "object",
        "properties": {"x": {"type": "string"}},
        "patternProperties": {name: {"type": "string"}, "^n_": {"type": "null"}},
        "additionalProperties": others,
    }
    inside = {"type": "array", "items": schema}
    assert _judged(inside) is not None
    assert _judged(inside, is_lenient=True) is None
    assert _read(inside, is_lenient=True)["items"] == {
        "type": "object",
        "properties": {"x": {"type": "string"}},
        "patternProperties": {"^n_": {"type": "null"}},
    }


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_where_no_name_can_be_followed_none_is_asked_for(name: str) -> None:
    schema = {"type": "object", "patternProperties": {name: {"type": "string"}}, "maxProperties": 3}
    assert _read(schema, is_lenient=True) == {"type": "object", "maxProperties": 3}


def test_names_that_can_be_followed_keep_what_stands_beside_them() -> None:
    schema = {"type": "object", "patternProperties": {r"\(?=x": {}, "^a": {}}, "additionalProperties": False}
    assert _read(schema, is_lenient=True) == schema
    odd = {"patternProperties": [r"\b"], "additionalProperties": False}
    assert _read(odd, is_lenient=True) == odd


@pytest.mark.parametrize(
    "pattern", [r"\(?=x", "[(?=]a", r"[\b]", r"\\b", r"\\1", "(?:a|b)", "(?<name>a)", r"[^\](?=]x", r"\d{2}"]
)
def test_a_pattern_that_only_looks_like_one_is_held(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert _read(schema, is_lenient=True) == schema


def test_a_call_is_forced_whose_function_has_such_a_pattern() -> None:
    parameters = {"type": "object", "properties": {"for": {"type": "string", "pattern": DURATION}}}
    arguments = arguments_of(Tool(name="wait", parameters=parameters), "tools[0]", Limits())
    assert judge(calls_of([("wait", arguments)], CallRules(is_required=True, is_single=True))) is None


@pytest.mark.parametrize("pattern", ["[" * 60_000, "[" * 60_000 + "\\", "(" * 60_000, "\\" * 60_001])
def test_patterns_are_read_in_time_that_grows_with_their_length(pattern: str) -> None:
    """The event loop waits."""
    began_s = time.thread_time()
    schema_structure({"pattern": pattern}, "x", Limits(max_structure_bytes=1 << 18), is_lenient=True)
    assert time.thread_time() - began_s < 1.0
