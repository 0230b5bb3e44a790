"""A JSON object's end is found in whatever parts it comes."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from router.openai_api.object_end import ObjectEnd

_TEXT = st.text(st.sampled_from('{}[]",:\\ aé'), max_size=6)
_VALUES = st.recursive(
    _TEXT | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(_TEXT, _VALUES, max_size=3), _TEXT, st.integers(1, 9), st.booleans())
def test_all_of_the_object_and_nothing_else(
    value: dict[str, object], behind: str, size: int, is_ascii: bool
) -> None:
    written = json.dumps(value, ensure_ascii=is_ascii)
    text, end, found = written + behind, ObjectEnd(), ""
    for at in range(0, len(text), size):
        assert end.is_over is (at >= len(written))
        part = text[at : at + size]
        found += part[: end.find(part)]
    assert end.is_over
    assert found == written


def test_what_has_not_ended_is_all_of_the_object() -> None:
    end = ObjectEnd()
    assert (end.find('{"a": "}\\"'), end.find("}"), end.is_over) == (10, 1, False)
