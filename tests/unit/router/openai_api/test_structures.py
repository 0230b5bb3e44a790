"""What a body may say of the form of its answer, and which structure that is."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from cache.structure import Structure, StructureKind
from router.errors import InvalidField, UnsupportedParameter
from router.limits import Limits
from router.openai_api.schema import parse_chat, parse_completion
from router.openai_api.structure_verdict import Refusal, judge
from router.openai_api.structures import parts
from tests.fakes.structures import follows

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
OBJECT = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}


def _structure(**fields: Any) -> Structure | None:
    chat = parse_chat({**CHAT, **fields}).structure
    completion = parse_completion({"model": "m", "prompt": "x", **fields}).structure
    assert chat == completion
    if chat is None:
        return None
    assert chat[0] in fields
    return chat[1]


def _refused(limits: Limits | None = None, **fields: Any) -> InvalidField:
    with pytest.raises(InvalidField) as caught:
        parse_chat({**CHAT, **fields}, limits or Limits())
    return caught.value


def _format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.mark.parametrize("value", [None, {"type": "text"}])
def test_text_is_free(value: Any) -> None:
    assert _structure(response_format=value) is None


def test_a_json_object_is_any_object() -> None:
    expected = Structure(StructureKind.JSON_SCHEMA, '{"type": "object"}')
    assert _structure(response_format={"type": "json_object"}) == expected
    assert _structure(structured_outputs={"json_object": True}) == expected


def test_a_json_object_with_a_schema_is_held_to_it() -> None:
    """As llama.cpp and others write it; to answer any object would be to overlook what was asked."""
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert _structure(response_format={"type": "json_object", "schema": schema}) == _structure(
        response_format=named
    )
    with pytest.raises(InvalidField) as caught:
        _structure(response_format={"type": "json_object", "schema": 5})
    assert caught.value.param == "response_format.schema"


def test_a_schema_is_lenient_unless_it_is_strict_and_keeps_its_order() -> None:
    for more, is_lenient in (
        ({}, True),
        ({"strict": None}, True),
        ({"strict": False}, True),
        ({"strict": True}, False),
    ):
        structure = _structure(response_format=_format(OBJECT, **more))
        assert structure is not None
        assert structure.is_lenient is is_lenient
        assert list(json.loads(structure.source)["properties"]) == ["b", "a"]


def test_the_older_names_say_the_same() -> None:
    for kind, value in (
        ("json", OBJECT),
        ("json", json.dumps(OBJECT)),
        ("regex", "a+"),
        ("choice", ["a", "b"]),
        ("grammar", 'start: "x"'),
    ):
        assert _structure(**{f"guided_{kind}": value}) == _structure(structured_outputs={kind: value})


def test_choices_are_a_grammar_of_strings() -> None:
    structure = _structure(guided_choice=["yes", 'no"\n', "yes"])
    assert structure == Structure(StructureKind.GRAMMAR, 'start: "yes" | "no\\"\\n"')


@pytest.mark.parametrize("first", [*range(0, 0x3000, 0x400), 0xFC00, 0x1F400, 0xE0000, 0x10FC00])
def test_choices_may_have_any_character(first: int) -> None:
    """U+007F was refused with a place in a grammar that nobody had written."""
    choices = [f"a{chr(code)}b" for code in range(first, first + 0x400)]
    asked = _structure(guided_choice=choices)
    assert asked is not None
    assert judge(asked) is None


def test_gbnf_becomes_lark() -> None:
    structure = _structure(guided_grammar='root ::= "a" rest\nrest ::= [0-9]+')
    assert structure is not None
    assert "start:" in structure.source
    assert "::=" not in structure.source


def test_grammars_are_read_in_time_that_grows_with_their_length() -> None:
    """The event loop waits: both took minutes."""
    began_s = time.thread_time()
    rules = "".join(f"r{number} ::= r{number + 1}\n" for number in range(4000))
    names = (f"{bits:012b}".replace("1", "-").replace("0", "_") for bits in range(2000))
    alike = "".join(f"a{name} ::= x\n" for name in names)
    for grammar in (
        f'root ::= r0\n{rules}r4000 ::= "a"',
        "\n" * 60_000 + 'root ::= "a"',
        "# " * 30_000 + '\nroot ::= "a"',
        f'root ::= x\nx ::= "a" x?\n{alike}',
    ):
        assert _structure(guided_grammar=grammar) is not None
    assert time.thread_time() - began_s < 5.0


@pytest.mark.parametrize(
    "grammar",
    [
        '?start: "a" | "b"\n',
        '!start: "a"\n',
        "%import common.INT\n?start: INT",
        'start[max_tokens=3]: "a"',
        '# a ::= b\n  start : "::=" // root ::= start',
        '\r\n// root ::= "a"\n\tx: "a"\nstart: x',
        '%llguidance {}\nstart: "a"',
    ],
)
def test_lark_is_taken_as_it_is_however_its_start_is_written(grammar: str) -> None:
    structure = _structure(guided_grammar=grammar)
    assert structure == Structure(StructureKind.GRAMMAR, grammar)
    assert judge(structure) is None


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        ('root ::= start\nstart ::= "a" | "b"\n', ["a", "b"], ["", "ab"]),
        ('start ::= "a" root?\nroot ::= "(" start ")"', ["(a)", "(a(a))"], ["a"]),
        ('# start: root\n\n root::=Ab ab "." 0x\nAb ::= "a"\nab ::= "b" ab?\n0x ::= "c"', ["ab.c"], ["aa.c"]),
        ('root ::= a-b a_b aB\na-b ::= "a"\na_b ::= "b"\naB ::= "c"', ["abc"], ["aaa"]),
    ],
)
def test_gbnf_is_known_by_how_it_writes_rules_whatever_they_are_called(
    grammar: str, texts: list[str], others: list[str]
) -> None:
    structure = _structure(guided_grammar=grammar)
    assert structure is not None
    assert [text for text in [*texts, *others] if follows(structure, text)] == texts


@pytest.mark.parametrize(
    ("grammar", "what"),
    [
        ('rot ::= "a"', "has no rule 'root'"),
        ("root ::= a-b", "has no rule 'a-b'"),
        ('root ::= "a" étage', "lacks a rule that it names"),
    ],
)
def test_a_rule_of_gbnf_that_is_not_there_is_named(grammar: str, what: str) -> None:
    assert _refused(guided_grammar=grammar).message == (
        f"'guided_grammar' begins with a rule of GBNF (name ::= ...), and {what}."
    )


def test_no_place_is_told_that_the_client_did_not_write() -> None:
    structure = _structure(guided_grammar='root ::= "a"{3,2}')
    assert structure is not None
    assert judge(structure) == Refusal("it cannot be compiled")


def test_what_is_said_of_a_grammar_is_of_its_notation() -> None:
    assert _refused(guided_grammar="root ::= (((").message == (
        "'guided_grammar' begins with a rule of GBNF (name ::= ...), and cannot be read as GBNF."
    )
    structure = _structure(guided_grammar='root: "a"')
    assert structure is not None
    assert judge(structure) == Refusal("it has no rule 'start', where a grammar in Lark's notation begins")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("response_format", {"response_format": "json"}),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("response_format", {"response_format": {"type": ["text"]}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        ("response_format.json_schema.name", {"response_format": _format({}, name="a b")}),
        ("response_format.json_schema.strict", {"response_format": _format({}, strict=1)}),
        ("response_format.json_schema.schema", {"response_format": _format(None)}),
        ("response_format.json_schema.schema", {"response_format": _format([])}),
        ("structured_outputs", {"structured_outputs": "a+"}),
        ("structured_outputs", {"structured_outputs": {}}),
        ("structured_outputs", {"structured_outputs": {"json_object": False}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
        ("structured_outputs", {"structured_outputs": {"frob": 1}}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": 5}}),
        ("structured_outputs.choice", {"structured_outputs": {"choice": []}}),
        ("guided_json", {"guided_json": "{"}),
        ("guided_json", {"guided_json": "[1]"}),
        ("guided_json", {"guided_json": '{"maximum": 1e400}'}),
        ("guided_json", {"guided_json": '"\\ud800"'}),
        ("guided_regex", {"guided_regex": ""}),
        ("guided_choice", {"guided_choice": ["a", ""]}),
        ("guided_grammar", {"guided_grammar": " "}),
        ("guided_grammar", {"guided_grammar": "root ::= ((("}),
        ("guided_choice", {"guided_choice": ["a"], "guided_regex": "a"}),
        ("guided_json", {"guided_json": {}, "response_format": {"type": "json_object"}}),
    ],
)
def test_what_makes_no_sense_is_named(param: str, fields: dict[str, Any]) -> None:
    error = _refused(**fields)
    assert (error.param, error.code) == (param, "invalid_value")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("structural_tag", "x"),
        ("whitespace_pattern", "x"),
        ("disable_any_whitespace", True),
        ("disable_additional_properties", True),
    ],
)
def test_what_is_not_implemented_is_named_so(name: str, value: object) -> None:
    error = _refused(structured_outputs={"json": {}, name: value})
    assert isinstance(error, UnsupportedParameter)
    assert error.param == f"structured_outputs.{name}"


def test_vllms_own_object_is_taken_with_all_its_switches_off() -> None:
    """`dataclasses.asdict(StructuredOutputsParams(regex="a+"))`."""
    absent = dict.fromkeys(
        ("json", "choice", "grammar", "json_object", "structural_tag", "whitespace_pattern", "_backend")
    )
    off = dict.fromkeys(
        ("disable_any_whitespace", "disable_additional_properties", "disable_fallback", "_backend_was_auto"),
        False,
    )
    assert _structure(structured_outputs={"regex": "a+", **absent, **off}) == Structure(
        StructureKind.REGEX, "a+"
    )


def test_a_structure_beside_free_text_is_one_structure() -> None:
    assert _structure(response_format={"type": "text"}, guided_regex="a+") == Structure(
        StructureKind.REGEX, "a+"
    )


def test_sizes_have_a_limit_that_is_named() -> None:
    limits = Limits(max_structure_bytes=256)
    for fields in (
        {"guided_regex": "ü" * 200},
        {"guided_choice": ["a" * 300]},
        {"guided_grammar": 'start: "' + "a" * 300 + '"'},
        {"guided_json": {"enum": ["a" * 300]}},
        {"guided_json": json.dumps({"enum": ["a" * 300]})},
        {"response_format": _format({"enum": ["a" * 300]})},
    ):
        assert "at most 256 bytes" in _refused(limits, **fields).message


def test_depth_has_a_limit_and_the_place_is_named() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for name in reversed("abc"):
        schema = {"type": "object", "properties": {name: schema}}
    assert _refused(Limits(max_schema_depth=2), guided_json=schema).message == (
        "'guided_json' must nest schemas at most 2 deep; "
        "at #/properties/a/properties/b/properties/c it goes deeper."
    )
    assert parse_chat({**CHAT, "guided_json": schema}, Limits(max_schema_depth=3)).structure


def test_parts_of_a_schema_are_found_where_schemas_are() -> None:
    schema = {
        "properties": {"items": {"const": {"properties": {"no": {}}}}, "a/b~": {"anyOf": [{}, True]}},
        "$defs": {"d": {"not": {}}},
        "items": [{}, {}],
        "additionalProperties": False,
        "enum": [{"properties": {"no": {}}}],
    }
    assert [part.shown() for part in parts(schema)] == [
        "#",
        "#/properties/items",
        "#/properties/a~1b~0",
        "#/$defs/d",
        "#/items/0",
        "#/items/1",
        "#/properties/a~1b~0/anyOf/0",
        "#/properties/a~1b~0/anyOf/1",
        "#/$defs/d/not",
    ]


def _written(schema: dict[str, Any]) -> Any:
    structure = _structure(guided_json=schema)
    assert structure is not None
    return json.loads(structure.source)


def test_excluded_bounds_that_would_pass_are_moved_inside() -> None:
    """llguidance let 0 pass for 0 < x <= 0.5."""
    schema = {"properties": {"exclusiveMinimum": {"exclusiveMinimum": 0, "maximum": 0.5}}}
    assert _written(schema) == {"properties": {"exclusiveMinimum": {"maximum": 0.5, "minimum": 5e-7}}}
