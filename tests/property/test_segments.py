"""Segments tokenized one by one give what the whole gives: on random tokenizers, and on what is reported.

The law is held for the cut alone (`Segmenter`), without the probe that guards it at start: whatever added
tokens a vocabulary has, with whatever flags, in whatever text.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from router.prompts.segment_cache import SegmentCache
from router.prompts.segments import Segmenter, SegmentRule, segment_rule
from tests.fakes.tokenizers import SHAPES, a_tokenizer

# Contents that overlap, begin or end with spaces and letters, contain each other.
CONTENTS = (
    *(
        "<|a|>",
        "<|a|>b",
        "<|",
        "<s>",
        "</s>",
        "[X]",
        "[X]\n",
        "ab",
        "b",
        "|>",
        "\n",
        " ",
        "  ",
        " <m>",
        "<m>",
    ),
    *("<m> ", "é", "_x_", "<|a|><s>", "user", "12", "é]", "-", "#"),
)
TEXT_PIECES = (
    *(*CONTENTS, *CONTENTS, "a", " ", "\n", "hello", " hello", "Hello ", "don't", "1234", "x y  z", "日本語"),
    *("e\u0301", "e", "\u0301", "<", "|", "[", "]", "a_x_a", ".", "\u00a0", "\t", "▁", "User"),
)

FLAGS = st.booleans()
ADDED = st.builds(
    lambda content, lstrip, rstrip, single_word, normalized, special: AddedToken(
        content,
        lstrip=lstrip,
        rstrip=rstrip,
        single_word=single_word,
        normalized=normalized,
        special=special,
    ),
    *(st.sampled_from(CONTENTS), FLAGS, FLAGS, FLAGS, FLAGS, FLAGS),
)
TEXTS = st.lists(st.sampled_from(TEXT_PIECES), max_size=14).map("".join)


def check(shape: str, data: st.DataObject) -> None:
    added = data.draw(st.lists(ADDED, max_size=6, unique_by=lambda token: token.content))
    tokenizer = a_tokenizer(shape, added, splits_special=data.draw(st.sampled_from([False, False, True])))
    segmenter = Segmenter.of(
        tokenizer.added_tokens_decoder.values(), splits_special=tokenizer.split_special_tokens
    )
    if segmenter is None:
        return
    for text in data.draw(st.lists(TEXTS, min_size=1, max_size=8)):
        segments = segmenter.split(text)
        assert "".join(segments) == text
        if panics(tokenizer, text):
            continue
        parts = [token_id for segment in segments for token_id in plain_ids(tokenizer, segment)]
        assert parts == plain_ids(tokenizer, text), segments


@pytest.mark.parametrize("shape", [*SHAPES, "tiny"])
@settings(max_examples=30)
@given(data=st.data())
def test_segments_make_the_whole(shape: str, data: st.DataObject) -> None:
    check(shape, data)


@pytest.mark.long
@pytest.mark.parametrize("shape", [*SHAPES, "tiny"])
@settings(max_examples=200)
@given(data=st.data())
def test_segments_make_the_whole_of_many_more_vocabularies(shape: str, data: st.DataObject) -> None:
    check(shape, data)


def panics(tokenizer: Any, text: str) -> bool:
    """Whether the library itself gives up on the whole: where one token strips what another one matches."""
    try:
        plain_ids(tokenizer, text)
    except BaseException as error:  # a Rust panic is no Exception
        if "bad split" not in str(error):
            raise
        return True
    return False


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module", params=[*SHAPES, "tiny"])
def rule(request: pytest.FixtureRequest) -> tuple[Any, SegmentRule]:
    tokenizer = a_tokenizer(request.param)
    tokenizer("")
    rule = segment_rule(tokenizer)
    assert isinstance(rule, SegmentRule), rule
    return tokenizer, rule


CHAT_PIECES = ("<|im_start|>", "<|im_end|>", "<|im_end|>\n", "user\n", "assistant\n", *TEXT_PIECES)
CHAT_TEXTS = st.lists(st.sampled_from(CHAT_PIECES), max_size=20).map("".join) | st.text(max_size=30)


@settings(max_examples=30)
@given(texts=st.lists(CHAT_TEXTS, min_size=1, max_size=6), max_bytes=st.sampled_from([0, 2000, 1 << 20]))
def test_a_cache_never_changes_the_ids(
    rule: tuple[Any, SegmentRule], texts: list[str], max_bytes: int
) -> None:
    """Whatever it remembers and forgets: the same text gives the same ids, the whole's."""
    tokenizer, segment_rule_ = rule
    cache = SegmentCache(segment_rule_, max_bytes)
    for text in (*texts, *texts):
        if not text.isprintable() and any("\ud800" <= char <= "\udfff" for char in text):
            continue
        begun = cache.begin(text, "salt")
        assert list(cache.finish(begun, add_special_tokens=False)) == plain_ids(tokenizer, text)
        begun = cache.begin(text, "salt")
        assert list(cache.finish(begun, add_special_tokens=True)) == list(tokenizer(text)["input_ids"])
        assert cache.statistics().num_bytes <= max_bytes


@given(st.sets(st.text(st.sampled_from("ab<|> "), min_size=1, max_size=4), min_size=1), st.text("ab<|> "))
def test_the_scan_finds_the_leftmost_and_longest(words: set[str], text: str) -> None:
    scan = Segmenter.of(
        [AddedToken(word, normalized=False) for word in words] + [AddedToken("<cut>", normalized=False)]
    )
    assert scan is not None
    found = [(match.start(), match.group()) for match in scan._scan.finditer(text)]
    expected, at = [], 0
    while at < len(text):
        longest = max((word for word in words if text.startswith(word, at)), key=len, default="")
        if longest:
            expected.append((at, longest))
        at += len(longest) or 1
    assert found == expected
