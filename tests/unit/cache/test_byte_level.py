"""Added tokens of byte-level vocabularies are text, in whatever characters."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from cache.byte_level import from_byte_level, misread_tokens
from cache.tokenizer_decoder import TokenizerDecoder
from replica.structures.vocabulary import StructureVocabulary
from router.prompts.token_bytes import token_bytes_of
from tests.fakes.tokenizers import CHATML_TOKENS, a_tokenizer

TEXTS = ("é]", "<é>", "Ġx", "日é", "[INST]")
ADDED = [AddedToken(text, special=False, normalized=False) for text in TEXTS]
SPECIAL = AddedToken("«s»", special=True, normalized=False)
TOKENIZER = a_tokenizer("bytes", [*CHATML_TOKENS, *ADDED, SPECIAL])
ID = {text: TOKENIZER.convert_tokens_to_ids(text) for text in (*TEXTS, SPECIAL.content)}


@pytest.mark.parametrize("text", TEXTS)
def test_what_a_prompt_says_comes_back(text: str) -> None:
    """The library reads `é]` as the byte E9 and a bracket: its text was U+FFFD and a bracket."""
    said = f"a {text}b é {text}{text}"
    ids = TOKENIZER(said, add_special_tokens=False)["input_ids"]
    assert ids.count(ID[text]) == 3
    assert TokenizerDecoder(TOKENIZER).decode(ids) == said


@pytest.mark.parametrize("text", TEXTS)
def test_its_bytes_are_its_texts(text: str) -> None:
    assert token_bytes_of(TOKENIZER)(ID[text]) == text.encode()


def test_structures_are_followed_over_its_text() -> None:
    known = StructureVocabulary(TOKENIZER, vocab_size=len(TOKENIZER), eos_token_ids=frozenset([0])).tokens
    for text in TEXTS:
        assert known.decode_bytes([ID[text]]) == text.encode()
        assert not known.is_special_token(ID[text])
        assert known.tokenize_str(text) == [ID[text]]


def test_a_special_one_is_left_out_or_spelled() -> None:
    ids = [ID[SPECIAL.content], *TOKENIZER("é", add_special_tokens=False)["input_ids"]]
    assert TokenizerDecoder(TOKENIZER).decode(ids) == "é"
    assert TokenizerDecoder(TOKENIZER, spells_special=True).decode(ids) == "«s»é"


def test_what_the_model_has_itself_is_spelled_in_bytes() -> None:
    """It is listed as added, too, in the files of some: it was learned from bytes."""
    tokenizer = a_tokenizer("bytes", [*CHATML_TOKENS, AddedToken("Ġ", special=False, normalized=False)])
    assert misread_tokens(tokenizer.backend_tokenizer) == {}
    assert TokenizerDecoder(tokenizer).decode([tokenizer.convert_tokens_to_ids("Ġ")]) == " "


def test_what_is_not_all_of_its_characters_is_text() -> None:
    assert (from_byte_level("Ġa"), from_byte_level("Ġ日"), from_byte_level("Ã©")) == (
        b" a",
        "Ġ日".encode(),
        "é".encode(),
    )
