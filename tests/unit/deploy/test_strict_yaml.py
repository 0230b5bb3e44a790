"""Whatever a text is, it is YAML or an error of YAML; both loaders say the same of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from deploy import strict_yaml

both = pytest.mark.parametrize("load", [strict_yaml.load, lambda text: strict_yaml.load_all(text)[0]])


@both
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: {c: 1, c: 2}", "the key 'c' is there twice.*line 2"),
        ("a: 1\nday: 2020-13-45", "'2020-13-45' is not what tag:yaml.org,2002:timestamp.*line 2"),
        ("a: !!bool maybe", "'maybe' is not what"),
        ("a: !!timestamp soon", "'soon' is not what"),
        ("a: !!int ''", "'' is not what"),
        ("a: [1", "line 1"),
        ('a: "\\ud800"', "line 1"),
    ],
)
def test_what_is_none_says_where(load: Callable[[str], Any], text: str, said: str) -> None:
    """Of a date that is none PyYAML raised ValueError, which nobody expects."""
    with pytest.raises(yaml.YAMLError, match=f"(?s){said}"):
        load(text)


@both
def test_a_merged_key_may_be_another(load: Callable[[str], Any]) -> None:
    """Whoever is merged with may be merged itself."""
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, y: 2}\nc: {<<: *b, x: 3}"
    assert load(text)["c"] == {"x": 3, "y": 2}


@both
def test_the_first_of_several_merged_wins(load: Callable[[str], Any]) -> None:
    """As YAML has it. PyYAML 6.0.4 takes the last, and of keys of one letter none that overrides."""
    text = "a: &a {limit: 1}\nb: &b {limit: 2, room: 2}\nc: {<<: [*a, *b]}"
    assert load(text)["c"] == {"limit": 1, "room": 2}


def test_documents_one_by_one() -> None:
    assert strict_yaml.load_all("--- {a: 1}\n---\n--- [b]\n") == [{"a": 1}, None, ["b"]]
    assert strict_yaml.load_all("ä: 1".encode()) == [{"ä": 1}]
    with pytest.raises(yaml.YAMLError, match="invalid"):
        strict_yaml.load_all("ä: 1".encode("latin-1"))
