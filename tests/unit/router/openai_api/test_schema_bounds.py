"""Excluded bounds: none passes, nothing between is refused, and what holds already stays as it is."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from cache.structure import Structure
from router.openai_api.schema import parse_chat
from router.openai_api.schema_bounds import make_inclusive
from router.openai_api.structure_verdict import Refusal, judge


def _number(**bounds: Any) -> dict[str, Any]:
    return {"type": "number", **bounds}


def _read(schema: dict[str, Any]) -> Structure:
    """As the API reads it."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "guided_json": schema}
    asked = parse_chat(chat).structure
    assert asked is not None
    return asked[1]


def _passes(schema: dict[str, Any], text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), _read(schema).grammar(), log_level=0)
    assert not matcher.get_error()
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "inside", "excluded"),
    [
        (_number(exclusiveMinimum=0, maximum=0.5), ["0.1", "0.5"], ["0", "0.0", "0.6"]),
        (_number(exclusiveMinimum=0, exclusiveMaximum=1e-6), ["0.0000005"], ["0", "0.000001"]),
        (_number(exclusiveMinimum=0, maximum=1e-6), ["0.0000005", "0.000001"], ["0"]),
        (_number(exclusiveMinimum=1e-7, exclusiveMaximum=1e-6), ["0.0000005"], ["0.0000001", "0.000001"]),
        (_number(exclusiveMinimum=-0.5, exclusiveMaximum=0), ["-0.1"], ["-0.5", "-0", "0", "-0.0"]),
        (_number(minimum=-3.5, exclusiveMaximum=-3), ["-3.5", "-3.1"], ["-3", "-3.0"]),
        (_number(exclusiveMinimum=3, maximum=3.25), ["3.1"], ["3", "3.0"]),
        (_number(minimum=0, exclusiveMinimum=True, maximum=0.5), ["0.1"], ["0", "0.0"]),
        ({"allOf": [_number(exclusiveMinimum=0), {"maximum": 0.5}]}, ["0.1"], ["0", "0.0"]),
        (
            {"$ref": "#/$defs/above", "maximum": 1e-7, "$defs": {"above": _number(exclusiveMinimum=0)}},
            ["0.00000005"],
            ["0"],
        ),
        (_number(exclusiveMaximum=1e11), ["99999999999.5"], ["100000000000", "100000000000.0"]),
        (_number(exclusiveMinimum=1e15), ["1000000000000001"], ["1000000000000000"]),
        ({"exclusiveMaximum": 10**12}, ["999999999999"], ["1000000000000"]),
        ({"type": ["integer", "null"], "exclusiveMaximum": 10**17}, ["99999999999999984"], [str(10**17)]),
        ({"type": "integer", "exclusiveMinimum": -(10**17)}, ["-99999999999999984"], [str(-(10**17))]),
        ({"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 4}, ["3"], ["2", "4"]),
    ],
    ids=json.dumps,
)
def test_what_is_excluded_does_not_pass_and_what_is_inside_does(
    schema: dict[str, Any], inside: list[str], excluded: list[str]
) -> None:
    assert judge(_read(schema)) is None
    assert [text for text in [*inside, *excluded] if _passes(schema, text)] == inside


@pytest.mark.parametrize(
    "schema",
    [
        _number(minimum=1e11, exclusiveMaximum=1e11),
        _number(exclusiveMinimum=1e11, maximum=1e11),
        _number(exclusiveMinimum=0, maximum=0),
        _number(exclusiveMinimum=5, maximum=4),
        {"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 3},
    ],
    ids=json.dumps,
)
def test_where_nothing_lies_between_that_is_said(schema: dict[str, Any]) -> None:
    assert judge(_read(schema)) == Refusal("no value can have it", "#")


@pytest.mark.parametrize(
    "schema",
    [
        _number(exclusiveMinimum=0),
        _number(exclusiveMinimum=0, maximum=1),
        _number(exclusiveMaximum=0.5),
        _number(exclusiveMinimum=0.25, exclusiveMaximum=0.5),
        _number(exclusiveMinimum=-0.5, maximum=0),
        _number(exclusiveMinimum=0, minimum=0.25, maximum=0.5),
        _number(exclusiveMaximum=1e17),
        _number(minimum=0, exclusiveMinimum=False, maximum=0.5),
        _number(exclusiveMinimum=0, maximum=10**400),
        _number(exclusiveMinimum=10**400),
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_what_is_held_already_stays_as_it_is(schema: dict[str, Any]) -> None:
    changed = copy.deepcopy(schema)
    make_inclusive([changed])
    assert changed == schema


@pytest.mark.parametrize(
    ("sign", "side", "other_side"), [(1, "Minimum", "maximum"), (-1, "Maximum", "minimum")]
)
@pytest.mark.parametrize(
    ("at", "other"), [(0, 1e-200), (0, 1 - 2**-53), (1, 1 + 2**-52), (3, 3.5), (10**6, 10**6 + 1e-9)]
)
def test_the_step_inwards_is_a_step_and_not_beyond_the_other_bound(
    at: int, other: float, sign: int, side: str, other_side: str
) -> None:
    schema = {f"exclusive{side}": sign * at, other_side: sign * other}
    make_inclusive([schema])
    assert set(schema) == {side.lower(), other_side}
    assert at < sign * schema[side.lower()] <= other
