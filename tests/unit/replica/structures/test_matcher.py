"""One answer's way through a structure."""

from __future__ import annotations

import numpy as np
import pytest

from cache.structure import Structure, StructureKind
from tests.fakes.structures import (
    END,
    allowed,
    at_random,
    begun,
    regex,
    schema,
    text_of,
    tiny_tokenizer,
    walk,
)


def _token(text: str) -> int:
    [token_id] = tiny_tokenizer().encode(text)  # type: ignore[attr-defined]
    assert isinstance(token_id, int)
    return token_id


def test_only_what_leads_on_may_come_and_the_end_ends_it() -> None:
    matcher = begun(regex("a|ab"))
    assert {text_of([token_id]) for token_id in allowed(matcher)} <= {"a", "ab"}
    matcher.advance(_token("a"))
    assert not matcher.is_over
    assert set(allowed(matcher)) == {0, END, _token("b")}
    matcher.advance(_token("b"))
    assert matcher.is_over
    assert matcher.failure is None


def test_the_end_waits_for_min_tokens_where_something_else_may_come() -> None:
    matcher = begun(regex("a+"), min_tokens=2)
    matcher.advance(_token("a"))
    assert not {0, END} & set(allowed(matcher))
    matcher.advance(_token("a"))
    assert {0, END} <= set(allowed(matcher))


def test_min_tokens_does_not_empty_a_mask() -> None:
    matcher = begun(regex("a|b|"), min_tokens=9)
    assert not {0, END} & set(allowed(matcher))
    matcher.advance(_token("a"))
    assert matcher.is_over


def test_a_token_that_was_not_allowed_is_a_failure_and_then_everything_is() -> None:
    matcher = begun(schema({"type": "integer"}))
    matcher.advance(_token("x"))
    assert matcher.failure is not None
    assert "x" not in matcher.failure.replace("text", "")
    assert not matcher.is_over
    words = np.zeros(matcher.num_words, dtype=np.int32)
    matcher.fill(words)
    assert (words == -1).all()


def test_each_answer_has_a_place_of_its_own() -> None:
    first = begun(regex("a[bc]"))
    first.advance(_token("a"))
    second = first.begun(0)
    assert _token("a") in allowed(second)
    assert allowed(first) == sorted(map(_token, "bc"))


@pytest.mark.parametrize("seed", range(5))
def test_what_was_said_before_is_said_again_from_its_tokens_alone(seed: int) -> None:
    """As after a replica was lost: the place is a function of the tokens."""
    structure = schema({"type": "array", "items": {"type": ["integer", "string"]}, "minItems": 3})
    taken, _ = walk(begun(structure), at_random(seed))
    for cut in range(1, len(taken), 5):
        again, original = begun(structure), begun(structure)
        for token_id in taken[:cut]:
            allowed(original)  # asked for a mask in between, or not: the same
            original.advance(token_id)
            again.advance(token_id)
        assert allowed(again) == allowed(original)


@pytest.mark.parametrize(
    ("structure", "text"),
    [
        (Structure(StructureKind.GRAMMAR, 'start: "<|im_end|>"'), "<|im_end|>"),
        (Structure(StructureKind.GRAMMAR, 'start: "a<|im_start|>b"'), "a<|im_start|>b"),
        (regex(r"x<\|endoftext\|>y"), "x<|endoftext|>y"),
        (schema({"const": "<|im_end|>"}), '"<|im_end|>"'),
    ],
)
def test_what_spells_a_special_token_comes_as_text(structure: Structure, text: str) -> None:
    """The token itself ended the answer, or was in no text: `x` alone came of the expression."""
    taken, has_ended = walk(begun(structure), at_random(0))
    assert has_ended
    assert tiny_tokenizer().decode(taken, skip_special_tokens=True) == text  # type: ignore[attr-defined]
