"""Bytes of single tokens, put together, are the text of all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cache.tokenizer_decoder import TokenizerDecoder
from router.prompts.token_bytes import token_bytes_of
from tests.fakes.tokenizers import byte_level, metaspace_bpe, wordpiece

TINY = str(Path(__file__).parents[4] / "replica" / "models" / "tiny")


@pytest.mark.parametrize("text", ["The sea, twice.", "é\u2764\U0001f600", "<|im_start|>", " \n\t"])
def test_byte_level_tokens_are_their_bytes(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    spell = token_bytes_of(tokenizer)
    assert b"".join(map(spell, tokenizer(text)["input_ids"])).decode() == text
    assert not spell(10**6)


def test_byte_fallback_and_leading_spaces() -> None:
    """As SentencePiece's models are converted: a space is a character of the token, a byte its own token."""
    vocabulary = {"\u2581the": 0, "<0xE2>": 1, "<0x9D>": 2, "<0xA4>": 3, "sea": 4, "</s>": 5}
    backend = Tokenizer(BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    spell = token_bytes_of(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))
    assert [spell(token) for token in range(6)] == [b" the", b"\xe2", b"\x9d", b"\xa4", b"sea", b"</s>"]


def gemma_like() -> Tokenizer:
    """Spaces are a character of the tokens, runs of them tokens that were added, and there are bytes."""
    backend = metaspace_bpe("never")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


ADDED = ["\u2581\u2581\u2581", "  ", "<tag>", "caf\u00e9", "\u65e5\u672c", "\u0120x"]


@pytest.mark.parametrize("make", [byte_level, gemma_like])
def test_tokens_that_were_added_are_what_the_text_has_of_them(make: Callable[[], Tokenizer]) -> None:
    """Each was told by its own name: Gemma's runs of spaces by a character of three bytes for each space."""
    backend = make()
    backend.add_tokens([AddedToken(name, normalized=False, special=False) for name in ADDED])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    spell, decoder = token_bytes_of(tokenizer), TokenizerDecoder(tokenizer)
    before = backend.encode("x", add_special_tokens=False).ids
    for name in ADDED:
        token_id = tokenizer.convert_tokens_to_ids(name)
        text = decoder.decode([*before, token_id, *before])
        assert spell(token_id).decode(errors="replace") == text.removeprefix("x").removesuffix("x")


@pytest.mark.parametrize("make", [byte_level, gemma_like, wordpiece])
def test_special_tokens_are_their_names(make: Callable[[], Tokenizer]) -> None:
    """Which are in no text: nothing reads them as spaces or bytes."""
    backend = make()
    backend.add_special_tokens([AddedToken("<\u2581\u00e9>", normalized=False, special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    spell = token_bytes_of(tokenizer)
    assert spell(tokenizer.convert_tokens_to_ids("<\u2581\u00e9>")).decode() == "<\u2581\u00e9>"
