"""What a structure says, in the notation that both sides read."""

from __future__ import annotations

import json
import pickle

import pytest
from llguidance import LLMatcher

from cache.structure import WHITE_SPACE, Structure, StructureKind


def _noted(structure: Structure) -> object:
    return json.loads(structure.grammar())["grammars"][0]


def test_a_schema_keeps_the_order_of_its_properties_and_gets_our_way_to_write_json() -> None:
    source = '{"properties": {"b": {}, "a": {}}, "x-guidance": {"whitespace_pattern": ".*"}}'
    noted = _noted(Structure(StructureKind.JSON_SCHEMA, source))
    assert isinstance(noted, dict)
    schema = noted["json_schema"]
    assert list(schema["properties"]) == ["b", "a"]
    assert schema["x-guidance"] == {"whitespace_pattern": WHITE_SPACE, "lenient": False}


@pytest.mark.parametrize(("source", "expected"), [("true", {}), ("false", False)])
def test_schemas_that_are_truth_values(source: str, expected: object) -> None:
    noted = _noted(Structure(StructureKind.JSON_SCHEMA, source, is_lenient=True))
    assert isinstance(noted, dict)
    schema = noted["json_schema"]
    if isinstance(schema, dict):
        assert schema.pop("x-guidance")["lenient"] is True
    assert schema == expected


@pytest.mark.parametrize(
    "regex", ["a", "a/b", r"a\/b", "a\nb", "a\\\nb", r"\\/", r"[/\\]/", "(a|b)*", r"\d{3}/\n"]
)
def test_a_regular_expression_is_written_as_the_library_writes_it(regex: str) -> None:
    noted = _noted(Structure(StructureKind.REGEX, regex))
    own = json.loads(LLMatcher.grammar_from_regex(regex.replace("\\\n", "\\n")))["grammars"][0][
        "lark_grammar"
    ]
    assert not LLMatcher.validate_grammar(json.dumps({"grammars": [noted]}))
    assert isinstance(noted, dict)
    assert noted["lark_grammar"].replace("[\\/", "[/") == own.replace("[\\/", "[/")


def test_a_grammar_is_taken_as_it_is() -> None:
    assert _noted(Structure(StructureKind.GRAMMAR, 'start: "ü"')) == {"lark_grammar": 'start: "ü"'}


def test_what_is_no_json_is_an_error_and_structures_travel() -> None:
    with pytest.raises(ValueError, match="Expecting"):
        Structure(StructureKind.JSON_SCHEMA, "{").grammar()
    structure = Structure(StructureKind.REGEX, "a+")
    assert pickle.loads(pickle.dumps(structure)) == structure
    assert hash(structure) == hash(Structure(StructureKind.REGEX, "a+"))
