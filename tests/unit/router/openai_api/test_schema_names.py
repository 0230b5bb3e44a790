"""Records whose names are of a choice: no other name is written, and each that may be is."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from cache.structure import Structure
from router.errors import InvalidField
from router.limits import Limits
from router.openai_api import schema_names
from router.openai_api.schema_names import MAX_NAMES, Records
from router.openai_api.structure_verdict import Refusal, judge
from router.openai_api.structures import schema_structure

INTEGERS = {"type": "integer"}
DEFINED = {"A b": {"title": "Kind", "type": "string", "enum": ["a", "b"], "description": "of what"}}
ESCAPED = {"c~0d": {"enum": ["a"]}, "c%20d": {"enum": ["a"]}}  # references to "c~d" and "c d" look so


def _read(schema: dict[str, Any], *, is_lenient: bool = False) -> Structure:
    return schema_structure(schema, "x", Limits(), is_lenient=is_lenient)


def _passes(structure: Structure, value: Any) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), structure.grammar(), log_level=0)
    assert not matcher.get_error()
    tokens = list(json.dumps(value, ensure_ascii=False).encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def _record(names: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "propertyNames": names, "additionalProperties": INTEGERS, **more}


@pytest.mark.parametrize("is_lenient", [True, False])
@pytest.mark.parametrize(
    "schema",
    [
        _record({"enum": ["a", "b"]}),  # Pydantic, by a `Literal`
        _record({"type": "string", "enum": ["a", "b"]}),  # Zod's `z.partialRecord`
        _record({"$ref": "#/$defs/A b"}, **{"$defs": DEFINED}),  # Pydantic, by an `Enum`
        _record({"$ref": "#/definitions/A b"}, definitions=DEFINED),
    ],
)
def test_names_of_a_choice_are_followed(schema: dict[str, Any], is_lenient: bool) -> None:
    structure = _read(schema, is_lenient=is_lenient)
    assert judge(structure) is None
    for value in ({}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}):
        assert _passes(structure, value)
    for value in ({"c": 1}, {"ab": 1}, {"": 1}, {"a": "1"}):
        assert not _passes(structure, value)


def test_names_that_are_required_have_to_come() -> None:
    """As Zod writes `z.record(z.enum(["a", "b"]), z.int())`."""
    structure = _read(_record({"enum": ["a", "b"]}, required=["a", "b"]))
    assert _passes(structure, {"a": 1, "b": 2})
    assert not any(_passes(structure, value) for value in ({}, {"a": 1}, {"b": 2}))


@pytest.mark.parametrize("required", [[], ["a"], ["a", "b"]])
def test_nothing_may_follow_once_all_names_have_come(required: list[str]) -> None:
    """A comma would lead nowhere: no further name may come, and the answer would end in an error."""
    structure = _read(_record({"enum": ["a", "b"]}, required=required))
    matcher = LLMatcher(LLTokenizer("byte"), structure.grammar(), log_level=0)
    assert matcher.try_consume_tokens(list(b'{"a": 1, "b": 2,')) == len('{"a": 1, "b": 2')
    assert matcher.try_consume_tokens(list(b"}")) == 1
    assert matcher.is_accepting()


def test_records_in_records_take_the_space_that_they_have_names() -> None:
    names = {"enum": [f"name {index}" for index in range(60)]}
    schema: dict[str, Any] = INTEGERS
    for _ in range(14):
        schema = {"type": "object", "propertyNames": names, "additionalProperties": schema}
    assert len(_read(schema).source) < 50_000


def test_definitions_of_the_clients_keep_their_names() -> None:
    inner = _record({"const": "a"})
    schema = {"items": _record({"const": "b"}, additionalProperties=inner), "$defs": {"values-0": INTEGERS}}
    definitions = json.loads(_read(schema).source)["$defs"]
    assert definitions.keys() == {"values-0", "values-1", "values-2"}
    assert definitions["values-0"] == INTEGERS
    assert _passes(_read(schema), [{"b": {"a": 1}}])


@pytest.mark.parametrize("definitions", [[], None])
def test_definitions_that_are_none_stay_as_they_are(definitions: Any) -> None:
    schema = _record({"const": "a"}, **{"$defs": definitions})
    assert json.loads(_read(schema, is_lenient=True).source) == schema


def test_one_name_and_any_value() -> None:
    schema = {"type": "object", "propertyNames": {"const": "a"}}
    structure = _read({"type": "array", "items": schema})
    assert _passes(structure, [{"a": [None]}, {}])
    assert not _passes(structure, [{"b": 1}])
    assert schema == {"type": "object", "propertyNames": {"const": "a"}}  # the client's own


@given(st.lists(st.text(max_size=4), min_size=1, max_size=3), st.text(max_size=4))
def test_a_name_is_written_whatever_is_in_it(names: list[str], other: str) -> None:
    structure = _read(_record({"enum": names}))
    assert all(_passes(structure, {name: 1}) for name in names)
    assert other in names or not _passes(structure, {other: 1})


@pytest.mark.parametrize(
    "names",
    [
        *({"enum": choice} for choice in ([], ["a", 1], "a", None)),
        {"const": 1},
        {"enum": ["a"], "maxLength": 3},
        {"type": "integer", "enum": ["a"]},
        *({"$ref": f"#/$defs/{name}"} for name in ("other", *ESCAPED)),
        {"$ref": "other.json#/$defs/A b"},
        {"$ref": 1},
        {"$ref": "#/$defs/A b", "pattern": "a"},
    ],
)
def test_what_is_no_choice_of_names_is_refused_as_ever(names: Any) -> None:
    schema = _record(names, **{"$defs": DEFINED | ESCAPED})
    assert json.loads(_read(schema).source) == schema
    assert judge(_read(schema)) is not None


@pytest.mark.parametrize("others", [INTEGERS, False])
@pytest.mark.parametrize("beside", [{"properties": {"c": INTEGERS}}, {"patternProperties": {"^c": INTEGERS}}])
def test_beside_other_properties_names_are_refused_as_ever(beside: dict[str, Any], others: object) -> None:
    refusal = judge(_read(_record({"enum": ["a", "b"]}, **beside, additionalProperties=others)))
    assert refusal == Refusal("'propertyNames' cannot be enforced", "#")


def test_a_choice_that_is_referred_to_often_counts_each_time() -> None:
    schema = {
        "$defs": {"A": {"enum": ["x" * 2000]}},
        "properties": {f"p{index}": _record({"$ref": "#/$defs/A"}) for index in range(100)},
    }
    with pytest.raises(InvalidField, match="'x' must have at most 65536 bytes"):
        _read(schema)


def test_names_that_make_it_too_long_once_written_are_refused_or_left() -> None:
    names = {"enum": [f"{index:0200}" for index in range(200)]}
    schema = _record({"$ref": "#/$defs/A"}, **{"$defs": {"A": names}})
    with pytest.raises(InvalidField, match="'x' must have at most 65536 bytes, this one has"):
        _read(schema)
    assert json.loads(_read(schema, is_lenient=True).source) == schema


@pytest.mark.parametrize("is_lenient", [True, False])
def test_names_are_counted_before_any_is_written(is_lenient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """57 KB became 125 MB, and a Router stood still for seconds, before it was refused."""
    written: list[None] = []
    monkeypatch.setattr(Records, "write_out", lambda _: written.append(None))
    num_bytes = Mock(return_value=2400)
    monkeypatch.setattr(schema_names, "_num_bytes", num_bytes)
    names = {"enum": [f"{index:03}" for index in range(400)]}
    record = {"propertyNames": {"$ref": "#/$defs/E"}}
    schema = {"$defs": {"E": names}, "anyOf": [record] * 700}
    if is_lenient:
        assert json.loads(_read(schema, is_lenient=True).source) == schema
    else:
        with pytest.raises(InvalidField, match="'x' must have at most 65536 bytes, also with the names"):
            _read(schema)
    assert not written
    num_bytes.assert_called_once_with(names["enum"])


@pytest.mark.parametrize(
    ("beside", "taken", "refused", "what"),
    [
        ({"minProperties": 2}, [{"a": 1, "b": 2}], [{"a": 1}], "'propertyNames' beside 'minProperties'"),
        ({"maxProperties": 1}, [{"a": 1}], [{"a": 1, "b": 2}], "'propertyNames' beside 'maxProperties'"),
        (
            {"additionalProperties": {"type": "array", "items": {"$ref": "#/additional%50roperties"}}},
            [{"a": [[]]}],
            [{"a": 1}],
            "'propertyNames'",
        ),
        (
            {"additionalProperties": {"$ref": "#/propertyNames"}},
            [{"a": "b"}],
            [{"a": "c"}],
            "'propertyNames'",
        ),
    ],
)
def test_what_stands_beside_names_is_followed_where_names_need_not_be(
    beside: dict[str, Any], taken: list[Any], refused: list[Any], what: str
) -> None:
    schema = _record({"enum": ["a", "b"]}, **beside)
    structure = _read(schema, is_lenient=True)
    assert judge(structure) is None
    assert all(_passes(structure, value) for value in taken)
    assert not any(_passes(structure, value) for value in refused)
    assert judge(_read(schema)) == Refusal(f"{what} cannot be enforced", "#")


@pytest.mark.parametrize("is_lenient", [True, False])
def test_one_name_at_least_is_followed(is_lenient: bool) -> None:
    structure = _read(_record({"enum": ["a", "b"]}, minProperties=1), is_lenient=is_lenient)
    assert judge(structure) is None
    assert [_passes(structure, value) for value in ({"b": 1}, {"c": 1}, {})] == [True, False, False]


@pytest.mark.parametrize("is_lenient", [True, False])
def test_where_no_name_may_be_none_is_asked_for(is_lenient: bool) -> None:
    schema = _record({"enum": ["a", "b"]}, additionalProperties=False)
    structure = _read(schema, is_lenient=is_lenient)
    assert judge(structure) is None
    assert _passes(structure, {})
    assert not _passes(structure, {"a": 1})


def test_a_part_with_a_name_of_its_own_is_read_as_before() -> None:
    schema = {"properties": {"m": {"$id": "https://x.y/z", **_record({"enum": ["a", "b"]})}}}
    structure = _read(schema, is_lenient=True)
    assert judge(structure) is None
    assert _passes(structure, {"m": {"c": 1}})
    assert judge(_read(schema)) == Refusal("'propertyNames' cannot be enforced", "#/properties/m")


@pytest.mark.parametrize("num_names", [MAX_NAMES, MAX_NAMES + 1, 2500])
def test_as_many_names_are_followed_as_there_may_be(num_names: int) -> None:
    """Without `strict` others are any, as before; the rest of the schema is followed."""
    structure = _read(_record({"enum": [f"n{index}" for index in range(num_names)]}), is_lenient=True)
    assert judge(structure) is None
    assert _passes(structure, {"n1": 1})
    assert not _passes(structure, {"n1": "1"})
    assert _passes(structure, {"other": 1}) is (num_names > MAX_NAMES)


def test_a_place_is_one_that_the_client_wrote() -> None:
    unique = {"type": "array", "uniqueItems": True}
    record = _record({"enum": ["a"]}, additionalProperties=unique)
    for schema, place in (({"properties": {"m": record}}, "#/properties/m"), (record, "#")):
        assert judge(_read(schema)) == Refusal("'uniqueItems' cannot be enforced", place)
