"""Whatever the structure and whatever is drawn: a text that came to its end has it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from hypothesis import example, given
from hypothesis import strategies as st

from cache.structure import Structure
from router.openai_api.schema import parse_chat
from router.openai_api.structure_verdict import judge
from tests.fakes.structures import at_random, begun, text_of, walk

_NAMES = st.sampled_from(["a", "b", 'c"c', "ü", "long name", "x"])
_SCALARS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-1000, 1000),
        st.integers(0, 10_000),
    ),
    st.builds(
        lambda low, size, names: {"type": "number", names[0]: low, names[1]: low + size},
        st.sampled_from([*range(-50, 50), -2.5, 0.25, 1e-7]),
        st.sampled_from([1e-7, 0.5, 1, 7.25, 1000]),
        st.sampled_from(
            [
                ("exclusiveMinimum", "maximum"),
                ("minimum", "exclusiveMaximum"),
                ("exclusiveMinimum", "exclusiveMaximum"),
            ]
        ),
    ),
    st.builds(
        lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size},
        st.integers(0, 4),
        st.integers(0, 8),
    ),
    st.sampled_from(
        [
            {"type": "string", "pattern": "^[a-f]{2,4}-[0-9]+$"},
            {"type": "string", "format": "date"},
            {"type": "string", "format": "uuid"},
            {"type": "string"},
        ]
    ),
    st.lists(
        st.one_of(st.integers(-9, 9), st.text('aü"\\\n/ ', max_size=4), st.booleans(), st.none()),
        min_size=1,
        max_size=4,
    ).map(lambda values: {"enum": values}),
)


def _inside(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    objects = st.builds(
        lambda properties, optional, more: {
            "type": "object",
            "properties": properties,
            "required": [name for name in properties if name not in optional],
            "additionalProperties": more,
        },
        st.dictionaries(_NAMES, inner, max_size=3),
        st.sets(_NAMES, max_size=2),
        st.just(False),
    )
    lists = st.builds(
        lambda items, low, size: {"type": "array", "items": items, "minItems": low, "maxItems": low + size},
        inner,
        st.integers(0, 2),
        st.integers(0, 3),
    )
    return st.one_of(
        objects, lists, st.lists(inner, min_size=1, max_size=3).map(lambda choices: {"anyOf": choices})
    )


SCHEMAS = st.recursive(_SCALARS, _inside, max_leaves=6)


def structure(value: object, field: str = "guided_json") -> Structure:
    """As the API reads it."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], field: value}
    asked = parse_chat(chat).structure
    assert asked is not None
    return asked[1]


@given(SCHEMAS, st.integers(0, 2**32))
def test_what_comes_to_its_end_has_the_schema(asked: dict[str, Any], seed: int) -> None:
    tokens, has_ended = walk(begun(structure(asked)), at_random(seed))
    if has_ended:
        jsonschema.validate(json.loads(text_of(tokens)), asked)


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=3), st.integers(0, 2**32))
@example(["\x7f"], 0)
def test_what_comes_to_its_end_is_one_of_the_choices(choices: list[str], seed: int) -> None:
    tokens, has_ended = walk(begun(structure(choices, field="guided_choice")), at_random(seed))
    assert has_ended
    assert text_of(tokens) in choices


@given(SCHEMAS)
def test_schemas_of_values_that_exist_are_followed(asked: dict[str, Any]) -> None:
    assert judge(structure(asked)) is None


@given(SCHEMAS, st.integers(0, 2**32), st.integers(0, 60))
def test_the_place_is_a_function_of_the_tokens(asked: dict[str, Any], seed: int, cut: int) -> None:
    """However often a mask was asked for: so a preempted or continued answer goes on the same way."""
    tokens, _ = walk(begun(structure(asked)), at_random(seed))
    again = begun(structure(asked))
    for token_id in tokens[:cut]:
        again.advance(token_id)
    picks = iter(tokens[cut:])
    taken, _ = walk(
        again, lambda choices: next(picks, 2 if 2 in choices else choices[0]), max_tokens=len(tokens[cut:])
    )
    assert taken == tokens[cut:]
