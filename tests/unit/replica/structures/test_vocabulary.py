"""Which tokenizers' tokens are known as bytes, and which are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models
from transformers import PreTrainedTokenizerFast

from replica.structures.compiler import compile_structure
from replica.structures.vocabulary import StructureVocabulary, TokenizerUnsuited
from tests.fakes.structures import at_random, regex, walk
from tests.fakes.tokenizers import CHATML_TOKENS, SHAPES, a_tokenizer

_SPACES = decoders.Replace("▁", " ")
_PIECES = decoders.Sequence([_SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


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
    tokenizer.backend_tokenizer.decoder = _PIECES
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
        [_SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("l", "L")]
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


def _with_pieces(shape: str, added: tuple[AddedToken, ...]) -> PreTrainedTokenizerFast:
    tokenizer = a_tokenizer(shape, added)
    if shape.startswith("unigram"):  # as if trained with bytes for what it has no piece for
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        pieces = [tuple(piece) for piece in model["vocab"]]
        tokenizer.backend_tokenizer.model = models.Unigram(pieces, unk_id=0, byte_fallback=True)
    if not shape.startswith(("bytes", "tiny")):
        tokenizer.backend_tokenizer.decoder = _PIECES
    return tokenizer


@pytest.mark.parametrize("shape", ["bytes", "tiny", "llama legacy", "metaspace first", "unigram never"])
def test_a_text_that_spells_a_special_token_is_text(shape: str) -> None:
    """It became the token: what a structure forced was missing in the answer, or ended it.

    `<unk>` is among the pieces' own tokens, too.
    """
    unknown = AddedToken("<unk>", special=True, normalized=False)
    tokenizer = _with_pieces(shape, CHATML_TOKENS if shape == "tiny" else (*CHATML_TOKENS, unknown))
    vocabulary = StructureVocabulary(tokenizer, vocab_size=len(tokenizer) + 3, eos_token_ids=frozenset({0}))
    special = set(tokenizer.convert_tokens_to_ids([token.content for token in CHATML_TOKENS]))
    for text in ("<|im_end|>", "a<|endoftext|>b", "he<unk>he", "<unk>"):
        ids = vocabulary.tokens.tokenize_str(text)
        assert not special & set(ids)
        assert tokenizer.decode(ids, skip_special_tokens=True).strip() == text
    assert all(vocabulary.tokens.is_special_token(token_id) for token_id in special)


def test_a_tag_that_is_a_token_and_not_special_stays_one() -> None:
    tag = AddedToken("<tool_call>", special=False, normalized=False)
    tokenizer = a_tokenizer("tiny", (*CHATML_TOKENS, tag))
    vocabulary = StructureVocabulary(tokenizer, vocab_size=len(tokenizer), eos_token_ids=frozenset({2}))
    assert vocabulary.tokens.tokenize_str("<tool_call>") == [tokenizer.convert_tokens_to_ids("<tool_call>")]


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
    tokenizer = _with_pieces(shape, CHATML_TOKENS)
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
