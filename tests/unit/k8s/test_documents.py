"""What a file's YAML is once kubectl has sent it."""

from __future__ import annotations

import pytest
import yaml

from k8s.documents import documents


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("---\n# nothing\n---\na: 1\n---\n", [{"a": 1}]),
        ("a: {b: null, c: ~, d: [null]}", [{"a": {"d": [None]}}]),
        ("2: a\ntrue: b", [{"2": "a", "true": "b"}]),
        ("on: 2026-01-31", [{"true": "2026-01-31"}]),
        ("kind: List\nitems: [{a: 1}, {kind: List, items: [{b: 2}, null]}]", [{"a": 1}, {"b": 2}]),
        ("kind: List", []),
        ("kind: List\nitems: {a: 1}", [{"a": 1}]),
        ("a: &a {b: 1}\nc: *a", [{"a": {"b": 1}, "c": {"b": 1}}]),
        ("- a\n--- b", [["a"], "b"]),
    ],
)
def test_documents_as_they_are_sent(text: str, found: list[object]) -> None:
    assert documents(text) == found


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: .nan", "? 2026-01-31\n: b", "a: 1\na: 2", "a: b: c"])
def test_what_cannot_be_sent(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        documents(text)
