"""Which tokenizers' tokens are known as bytes, and which are refused."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from tokenizers import AddedToken, decoders
from transformers import PreTrainedTokenizerFast

from cache.structure import Structure, StructureKind
from replica.structures.compiler import compile_structure
from replica.structures.vocabulary import StructureVocabulary, TokenizerUnsuited
from tests.fakes.structures import allowed, at_random, regex, schema, walk
from tests.fakes.tokenizers import (
    CHATML_TOKENS,
    PIECES,
    SHAPES,
    SPACES,
    TAG_TOKENS,
    a_tokenizer,
    with_bytes,
)


@pytest.mark.parametrize("shape", ["bytes", "bytes+space", "bytes+nfc", "tiny"])
def test_byte_level_tokens_are_bytes(shape: str) -> None:
    tokenizer = a_tokenizer(shape)
    vocabulary = StructureVocabulary(tokenizer, vocab_size=len(tokenizer) + 37, eos_token_ids=frozenset({2}))
    ids = tokenizer.encode("Grüße, 世界! {}", add_special_tokens=False)
    assert vocabulary.tokens.decode_bytes(ids).decode() == tokenizer.decode(ids)
    assert vocabulary.num_words == -(-(len(tokenizer) + 37) // 32)


@pytest.mark.parametrize("shape", ["llama legacy", "metaspace first", "metaspace always"])
def test_sentencepiece_with_byte_fallback_is_known_by_its_decoder(shape: str) -> None:
    tokenizer = a_tokenizer(shape)
    tokenizer.backend_tokenizer.decoder = PIECES
    vocabulary = StructureVocabulary(tokenizer, vocab_size=len(tokenizer), eos_token_ids=frozenset({0}))
    ids = tokenizer.encode("hello ü", add_special_tokens=False)
    assert vocabulary.tokens.decode_bytes(ids).decode().strip() == "hello ü"


@pytest.mark.parametrize("shape", sorted(set(SHAPES) - {"bytes", "bytes+space", "bytes+nfc"}))
def test_others_are_refused(shape: str) -> None:
    tokenizer = a_tokenizer(shape)
    with pytest.raises(TokenizerUnsuited):
        StructureVocabulary(tokenizer, vocab_size=len(tokenizer), eos_token_ids=frozenset({0}))


def test_a_tokenizer_whose_text_is_not_its_bytes_is_refused() -> None:
    tokenizer = a_tokenizer("llama legacy")
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("l", "L")]
    )
    with pytest.raises(TokenizerUnsuited, match="decodes otherwise"):
        StructureVocabulary(tokenizer, vocab_size=len(tokenizer), eos_token_ids=frozenset({0}))


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(TokenizerUnsuited):
        StructureVocabulary(object(), vocab_size=5, eos_token_ids=frozenset())


def test_what_ends_a_text_is_out_of_the_mask_of_what_does_not() -> None:
    tokenizer = a_tokenizer("tiny")
    vocabulary = StructureVocabulary(
        tokenizer, vocab_size=len(tokenizer), eos_token_ids=frozenset({0, 2, 35})
    )
    bits = np.unpackbits(vocabulary.without_ends.view(np.uint8), bitorder="little")
    assert sorted((1 - bits).nonzero()[0]) == [0, 2, 35]


@pytest.mark.parametrize(
    ("named", "ends"), [({2, -1}, [2]), ({2, 1 << 40}, [2]), ({0, 1850}, [0]), ({-1}, [2])]
)
def test_an_end_that_is_no_token_is_left_out(named: set[int], ends: list[int]) -> None:
    """It once left the model without structures; without any other end there is the tokenizer's."""
    tokenizer = a_tokenizer("tiny")
    assert len(tokenizer) < 1850
    vocabulary = StructureVocabulary(tokenizer, vocab_size=1856, eos_token_ids=frozenset(named))
    assert vocabulary.tokens.eos_tokens == ends


def test_a_tokenizers_end_without_logits_is_left_out() -> None:
    """As of a tokenizer that was given one and whose model was not."""
    tokenizer = a_tokenizer("bytes")
    tokenizer.eos_token = "<|im_end|>"
    num_logits = tokenizer.eos_token_id
    vocabulary = StructureVocabulary(tokenizer, vocab_size=num_logits, eos_token_ids=frozenset({num_logits}))
    assert num_logits not in vocabulary.tokens.eos_tokens


@pytest.mark.parametrize("shape", ["bytes", "tiny", "llama legacy", "metaspace first", "unigram never"])
def test_a_text_that_spells_a_special_token_is_text(shape: str) -> None:
    """It became the token: what a structure forced was missing in the answer, or ended it.

    `<unk>` is among the pieces' own tokens, too.
    """
    unknown = AddedToken("<unk>", special=True, normalized=False)
    tokenizer = with_bytes(shape, CHATML_TOKENS if shape == "tiny" else (*CHATML_TOKENS, unknown))
    vocabulary = StructureVocabulary(tokenizer, vocab_size=len(tokenizer) + 3, eos_token_ids=frozenset({0}))
    special = set(tokenizer.convert_tokens_to_ids([token.content for token in CHATML_TOKENS]))
    for text in ("<|im_end|>", "a<|endoftext|>b", "he<unk>he", "<unk>"):
        ids = vocabulary.tokens.tokenize_str(text)
        assert not special & set(ids)
        assert tokenizer.decode(ids, skip_special_tokens=True).strip() == text
    assert all(vocabulary.tokens.is_special_token(token_id) for token_id in special)


def _tagged(shape: str, tags: str) -> tuple[PreTrainedTokenizerFast, StructureVocabulary]:
    """Its end is `<|im_end|>`."""
    tokenizer = with_bytes(shape, (*CHATML_TOKENS, *TAG_TOKENS[tags]))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return tokenizer, StructureVocabulary(
        tokenizer, vocab_size=len(tokenizer) + 3, eos_token_ids=frozenset({end})
    )


_NAMES = [
    "<tool_call>",
    "a</tool_call>b",
    " <think>hell",
    "<think></think>\n<tool_call>",
    "a[CALL]b",
    "<tool",
]


@pytest.mark.parametrize("tags", TAG_TOKENS)
@pytest.mark.parametrize("shape", ["bytes", "tiny", "llama legacy", "metaspace first", "unigram never"])
def test_texts_that_spell_tags_are_followed_to_their_end(shape: str, tags: str) -> None:
    """Qwen's tags, tokens that are not special, were asked for where a text is forced, and then not taken."""
    tokenizer, vocabulary = _tagged(shape, tags)
    enough = schema({"type": "array", "items": {"enum": _NAMES}, "minItems": 2, "maxItems": 2})
    for structure, is_text in (
        *((regex(re.escape(text)), lambda said, text=text: said == text) for text in _NAMES),
        (regex("(yes|<think>|</think>)"), lambda said: said in ("yes", "<think>", "</think>")),
        (regex("<tool_call>[a-z]{3}</?think>"), re.compile("<tool_call>[a-z]{3}</?think>").fullmatch),
        (Structure(StructureKind.GRAMMAR, 'start: "<think>"+ "!"'), re.compile("(<think>)+!").fullmatch),
        (enough, lambda said: set(json.loads(said)) <= set(_NAMES)),
    ):
        compiled = compile_structure(vocabulary, structure)
        for seed in range(4):
            taken, is_whole = walk(
                compiled.begun(0), random.Random(seed).choice, ends=vocabulary.tokens.eos_tokens
            )
            assert is_whole
            assert is_text(vocabulary.tokens.decode_bytes(taken).decode())
            text = tokenizer.decode([*tokenizer.encode("x", add_special_tokens=False), *taken])
            assert is_text(text.removeprefix("x"))


@pytest.mark.parametrize("shape", ["bytes", "tiny", "llama legacy", "metaspace first", "unigram never"])
def test_a_tag_that_is_a_token_of_texts_is_what_a_text_is_made_of(shape: str) -> None:
    """A trained model says it so, where it has to and where it may."""
    tokenizer, vocabulary = _tagged(shape, "plain")
    tag = tokenizer.convert_tokens_to_ids("<tool_call>")
    [a] = vocabulary.tokens.tokenize_str("a")
    assert vocabulary.tokens.tokenize_str("a<tool_call>a") == [a, tag, a]
    forced = compile_structure(vocabulary, regex("<tool_call>a")).begun(0)
    assert allowed(forced) == [tag]
    free = compile_structure(vocabulary, regex("[^>]*<tool_call>(a|b)")).begun(0)
    pieces = [token_id for token_id in allowed(free) if vocabulary.tokens.decode_bytes([token_id]) == b"<"]
    assert pieces  # by which it can be spelled, too
    assert tag in allowed(free)
    free.advance(tag)
    assert {vocabulary.tokens.decode_bytes([token_id]) for token_id in allowed(free)} == {b"a", b"b"}


def test_a_tag_that_ends_the_text_is_in_no_text() -> None:
    tokenizer = a_tokenizer("tiny", (*CHATML_TOKENS, *TAG_TOKENS["plain"]))
    end = tokenizer.convert_tokens_to_ids("</think>")
    vocabulary = StructureVocabulary(tokenizer, vocab_size=len(tokenizer), eos_token_ids=frozenset({end}))
    assert end not in allowed(compile_structure(vocabulary, regex(".{3}")).begun(0))
    forced = compile_structure(vocabulary, regex("a</think>")).begun(0)
    taken, is_whole = walk(forced, random.Random(0).choice, ends=[end])
    assert is_whole
    assert vocabulary.tokens.decode_bytes(taken) == b"a</think>"


def test_holes_in_a_vocabulary_with_tags_stand_for_nothing() -> None:
    tokenizer, vocabulary = _tagged("tiny", "plain")
    digits = compile_structure(vocabulary, regex(r"[<>0-9\[\]]{8}")).begun(0)
    assert max(allowed(digits)) < len(tokenizer)
    beyond = len(tokenizer) + 1  # as without tags
    assert vocabulary.tokens.is_special_token(beyond)
    assert vocabulary.tokens.decode_bytes([beyond]) == f"<[{beyond}]>".encode()


_STRIPPING = AddedToken("<or>", special=False, normalized=False, lstrip=True, rstrip=True)


@pytest.mark.parametrize("added", [(), (_STRIPPING,)])
@pytest.mark.parametrize("text", ["he hell", "e\u0301", "a \ufb01 \u212b", " he  <or>\n", "[ he <or> hell ]"])
@pytest.mark.parametrize(
    "shape",
    ["bytes", "bytes+space", "bytes+nfc", "tiny", "llama legacy", "metaspace always", "unigram first"],
)
def test_a_text_is_forced_to_the_letter(shape: str, text: str, added: tuple[AddedToken, ...]) -> None:
    """What a tokenizer does to a prompt's text (NFC, as Qwen's does, a space before it) made another of it,
    which was asked for and then not taken."""
    tokenizer = with_bytes(shape, (*CHATML_TOKENS, *added))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    vocabulary = StructureVocabulary(tokenizer, vocab_size=len(tokenizer), eos_token_ids=frozenset({end}))
    forced = compile_structure(vocabulary, regex(re.escape(text))).begun(0)
    taken, is_whole = walk(forced, random.Random(0).choice, ends=[end])
    assert is_whole
    assert vocabulary.tokens.decode_bytes(taken).decode() == text


def test_a_special_token_that_merges_lead_to_keeps_its_place() -> None:
    tokenizer = a_tokenizer("bytes", (*CHATML_TOKENS, AddedToken("hell", special=True, normalized=False)))
    vocabulary = StructureVocabulary(tokenizer, vocab_size=len(tokenizer), eos_token_ids=frozenset({0}))
    assert vocabulary.tokens.tokenize_str("he") == tokenizer.encode("he")


@pytest.mark.parametrize("shape", ["bytes", "tiny", "llama legacy", "metaspace first", "unigram never"])
@pytest.mark.parametrize("num_lacking", [1, 2])
def test_added_tokens_without_logits_are_never_asked_for(shape: str, num_lacking: int) -> None:
    """They left the model without structures: Gemma 3's of 1B has such a one, `<image_soft_token>`.

    A text that spells one consists of others: a mask of what is not there would forbid every token.
    """
    tokenizer = with_bytes(shape, CHATML_TOKENS)
    tokenizer.backend_tokenizer.add_tokens([AddedToken("<or>", special=False, normalized=False)])
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("<im>", special=True, normalized=False)])
    num_logits = len(tokenizer) - num_lacking
    vocabulary = StructureVocabulary(tokenizer, vocab_size=num_logits, eos_token_ids=frozenset({0}))
    assert vocabulary.num_words == -(-num_logits // 32)
    known = compile_structure(vocabulary, regex("(<or>|<im>)hell")).begun(0)
    taken, _ = walk(known, at_random(0))
    assert taken
    assert max(taken) < num_logits
    text = vocabulary.tokens.decode_bytes(taken).decode().strip()
    assert text in ("<or>hell", "<im>hell")
    is_whole = tokenizer.convert_tokens_to_ids("<or>") in vocabulary.tokens.tokenize_str("<or>")
    assert is_whole is (num_lacking == 1)
