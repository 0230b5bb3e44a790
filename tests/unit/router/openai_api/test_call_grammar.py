"""Calls as a structure: what may be written, by what was asked, told byte by byte."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from cache.structure import GrammarLimits, Structure, StructureKind
from router.errors import InvalidField
from router.limits import Limits
from router.openai_api.call_grammar import CallRules, arguments_of, calls_of
from router.openai_api.tools import Tool
from tests.fakes.structures import schema

PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/place"}},
    "required": ["place"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["Ulm", "Bern"]}},
}
TOOLS = [Tool(name="weather", parameters=PLACE, is_strict=True), Tool(name="now")]
ULM = '<tool_call>\n{"name": "weather", "arguments": {"place": "Ulm"}}\n</tool_call>'
ROME = ULM.replace("Ulm", "Rom")
NOW = '<tool_call>{"name":"now","arguments":{}}</tool_call>'
OTHER = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'
ANSWER = schema({"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False})

FORCED = CallRules(is_required=True, is_single=False)
ONE = CallRules(is_required=True, is_single=True)
FREE = CallRules(is_required=False, is_single=False)
FREE_ONE = CallRules(is_required=False, is_single=True)
EITHER = CallRules(is_required=False, is_single=False, answer=ANSWER)


def structure(rules: CallRules) -> Structure:
    return calls_of([(tool.name, arguments_of(tool, "tools[0]", Limits())) for tool in TOOLS], rules)


def ends(rules: CallRules, text: str) -> str:
    """`no`: it cannot be written; `cut`: more must come; `may`: it may end there; `must`: it does."""
    limits = LLParserLimits(verbose_errors=False, **asdict(GrammarLimits()))
    matcher = LLMatcher(LLTokenizer("byte"), structure(rules).grammar(), log_level=0, limits=limits)
    data = list(text.encode())
    if matcher.try_consume_tokens(data) != len(data):
        return "no"
    assert not matcher.is_error()
    if matcher.is_stopped():
        return "must"
    return "may" if matcher.is_accepting() else "cut"


@pytest.mark.parametrize(
    ("rules", "text", "expected"),
    [
        (FORCED, ULM, "may"),
        (FORCED, f"{ULM}\n", "may"),  # a line's end does not force another call
        (FORCED, f"{ULM}\n{NOW}", "may"),
        (FORCED, ULM[:-3], "cut"),
        (FORCED, "", "cut"),
        *[(FORCED, text, "no") for text in (ROME, OTHER, "Hello", f"Hello {ULM}", f"{ULM} Hello")],
        (ONE, ULM, "must"),
        (ONE, NOW, "must"),
        (ONE, f"{ULM}\n", "no"),
        (ONE, "Hello", "no"),
        (FREE, "Hello", "may"),
        (FREE, "", "may"),
        (FREE, "Hello <tool", "may"),
        (FREE, "Hello <tool_call>", "cut"),
        (FREE, f"Hello {ULM} and {NOW} bye", "may"),
        (FREE, f"Hello {ROME}", "no"),
        (FREE, OTHER, "no"),
        (FREE_ONE, "Hello", "may"),
        (FREE_ONE, f"Hello {ULM}", "must"),
        (EITHER, ULM, "may"),
        (EITHER, '{"x": true}', "must"),
        (EITHER, "Hello", "no"),
        (EITHER, '{"y": true}', "no"),
    ],
)
def test_what_may_be_written(rules: CallRules, text: str, expected: str) -> None:
    assert ends(rules, text) == expected


def test_an_answer_beside_calls_may_be_a_regular_expression() -> None:
    rules = CallRules(False, False, Structure(StructureKind.REGEX, "a/b|c"))
    assert [ends(rules, text) for text in ("a/b", "c", "d", NOW)] == ["must", "must", "no", "may"]


@pytest.mark.parametrize("kind", ["array", ["string", "null"], "objct", None])
def test_arguments_are_objects(kind: object) -> None:
    tool = Tool(name="f", parameters={"type": kind})
    with pytest.raises(InvalidField) as caught:
        arguments_of(tool, "tools[3]", Limits())
    assert caught.value.param == "tools[3].function.parameters"


def test_who_says_nothing_of_parameters_has_none() -> None:
    assert '"properties":{},"additionalProperties":false' in arguments_of(TOOLS[1], "x", Limits()).source


def test_a_functions_schema_has_the_limits_of_any() -> None:
    tool = Tool(name="f", parameters={"properties": {"x": {"enum": ["a" * 300]}}})
    with pytest.raises(InvalidField, match="at most 256 bytes"):
        arguments_of(tool, "tools[0]", Limits(max_structure_bytes=256))
