"""What no replica could follow is refused with its place, in our words; all else is taken."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cache.structure import GrammarLimits, Structure, StructureKind
from router.openai_api import structure_verdict
from router.openai_api.structure_verdict import Refusal, judge
from tests.fakes.structures import regex, schema


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _many(num: int) -> dict[str, Any]:
    return {f"p{index}": {"type": "string"} for index in range(num)}


def _in_grammar(value: object) -> Structure:
    return Structure(StructureKind.GRAMMAR, f'start: "a" %json {json.dumps(value)}')


_UNIQUE = {"type": "array", "uniqueItems": True}
_RECURSIVE = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
_TREE = {
    "$defs": {"n": {**_object(kids={"type": "array", "items": {"$ref": "#/$defs/n"}}), "required": ["kids"]}},
    "$ref": "#/$defs/n",
}


@pytest.mark.parametrize(
    ("structure", "pointer", "reason"),
    [
        (
            schema(_object(a=_object(b=_UNIQUE))),
            "#/properties/a/properties/b",
            "'uniqueItems' cannot be enforced",
        ),
        (schema({"anyOf": [{}, {"not": {}}]}), "#/anyOf/1", "'not' cannot be enforced"),
        (schema({"$defs": {"u": _UNIQUE}, **_object(a={"$ref": "#/$defs/u"})}), "#/$defs/u", "'uniqueItems'"),
        (schema(_object(a={"type": "objct"})), "#/properties/a", "its 'type' is none"),
        (
            schema(_object(a={"type": "string", "format": "secret"})),
            "#/properties/a",
            "its 'format' is not known",
        ),
        (schema(_object(a={"type": "string", "pattern": "(secret"})), "#/properties/a", "cannot be read"),
        (schema(_object(a={"type": "string", "pattern": "(?=secret)"})), "#/properties/a", "looks around"),
        (schema({"type": "string", "pattern": r"(secret)\1"}), "#", "back-references"),
        (schema({"type": "string", "pattern": r"\bsecret"}), "#", "asks for a word's boundary"),
        (schema(_object(a={"patternProperties": {r"\B": {}}})), "#/properties/a", "a word's boundary"),
        (
            schema(_object(a={"oneOf": [{"type": "integer"}, {"type": "number"}]})),
            "#/properties/a",
            "'oneOf' cannot be enforced",
        ),
        (schema(_object(a={"$ref": "#/secret"})), "#/properties/a", "a '$ref' in it leads nowhere"),
        (schema({"$ref": "http://secret.example/x"}), "#", "a '$ref' in it leads nowhere"),
        (schema(_object(a={"minLength": "secret"})), "#/properties/a", "a value of the wrong type"),
        (schema(_object(a={"minimum": 10**400})), "#/properties/a", "a number in it is out of range"),
        (schema(_object(a={"multipleOf": 10**400})), "#/properties/a", "a number in it is out of range"),
        (schema({"enum": []}), "#", "no value can have it"),
        (schema({"type": "integer", "minimum": 5, "maximum": 1}), "#", "no value can have it"),
        (schema(_RECURSIVE), "#/$defs/a", "cannot be compiled"),
        (schema({"enum": [f"secret{index}" for index in range(100_000)]}), "#", "too complex"),
        (schema(_object(**_many(1500))), "#", "too complex: at most 2000 "),
        (
            _in_grammar(_object(**{f"p{i}": _object(**_many(1000)) for i in range(30)})),
            None,
            "it is too large",
        ),
        (regex("((a{1000}){1000}){1000}"), None, "too complex"),
        (regex("(secret"), None, "cannot be read"),
        (regex("(?<=secret)a"), None, "looks around"),
        (
            Structure(StructureKind.GRAMMAR, 'start: "a"\n  secret'),
            None,
            "line 2, column 9 cannot be compiled",
        ),
    ],
)
def test_the_place_and_the_reason_are_told_and_nothing_is_quoted(
    structure: Structure, pointer: str | None, reason: str
) -> None:
    refusal = judge(structure)
    assert refusal is not None
    assert refusal.pointer == pointer
    assert reason in refusal.reason
    assert "secret" not in refusal.reason


def test_a_limit_is_named_wherever_it_was_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the line in a grammar that the client has never seen, as where its functions are too many."""
    monkeypatch.setattr(structure_verdict, "_LIMITS", GrammarLimits(max_grammar_size=1000))
    reason = "it is too large: it may have at most 200000 symbols, a few for each rule, property and value"
    for place, structure in (
        ("#", schema(_object(**_many(500)))),
        (None, _in_grammar(_object(**_many(500)))),
    ):
        assert judge(structure) == Refusal(reason, place)
    # 64 functions of 270 properties each; it takes seconds to find out.
    panic = "panic: assertion failed: grammar.symbols.len() < u16::MAX as usize - 10"
    assert structure_verdict._reason(panic) == reason.replace("200000", "65525")


def test_what_is_quoted_passes_no_limit() -> None:
    quoting = Structure(StructureKind.GRAMMAR, 'start: "grammar size too big" (')
    assert judge(quoting) == Refusal("line 1, column 32 cannot be compiled")


@pytest.mark.parametrize(
    "structure",
    [
        schema({}),
        schema(_object(a=_UNIQUE), is_lenient=True),
        schema(_TREE),
        schema({"enum": [f"v{index * 7919}" for index in range(5000)]}),
        schema({"type": "string", "minLength": 10**9}),
        regex("(a+)+$"),
        regex("(.*a){30}.*"),
        regex("(a{1,1000}){1,1000}"),
        regex("[ab]*a[ab]{2000}"),
        Structure(StructureKind.GRAMMAR, 'start: a\na: a a | "x"'),
    ],
    ids=lambda structure: structure.source[:40],
)
def test_what_can_be_followed_is_taken_however_it_looks(structure: Structure) -> None:
    assert judge(structure) is None


@pytest.mark.parametrize(
    "structure",
    [
        schema({"type": "integer", "multipleOf": 100_000_007}),
        schema({"type": "integer", "multipleOf": int("9" * 400)}),
        schema({"$ref": "#/hidden", "multipleOf": 997, "hidden": {"type": "integer", "multipleOf": 1009}}),
        schema({"allOf": [{"multipleOf": each} for each in (97, 89, 83)]}),
        Structure(StructureKind.GRAMMAR, 'start: %json\n{"type": "integer", "multipleOf": 100000007}'),
        Structure(StructureKind.GRAMMAR, f'start: %json {{"multipleOf": {"9" * 400}}}'),
    ],
    ids=lambda structure: structure.source[:40],
)
def test_what_would_be_compiled_for_minutes_is_not_begun(structure: Structure) -> None:
    """No thread can be stopped, and memory grows for as long."""
    refusal = judge(structure)
    assert refusal is not None
    assert "'multipleOf' together may have at most 100000" in refusal.reason


@pytest.mark.parametrize("step", [1, 0.01, 0.25, 60, 1000, 1024, 3600, 1_000_000, 1e-9, 2.0**-10])
def test_steps_in_use_are_followed(step: float) -> None:
    assert judge(schema({"type": "number", "multipleOf": step})) is None


def test_the_search_for_the_place_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part may take as long as a structure may, and a schema has hundreds."""
    monkeypatch.setattr(structure_verdict, "MAX_PLACE_S", 0.0)
    refusal = judge(schema(_object(a=_UNIQUE)))
    assert refusal == Refusal("'uniqueItems' cannot be enforced", "#")
