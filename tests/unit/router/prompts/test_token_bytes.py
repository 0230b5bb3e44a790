"""Bytes of single tokens, put together, are the text of all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from router.prompts.token_bytes import token_bytes_of

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
