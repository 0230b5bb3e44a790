"""Tokenizers' ways back to text that read bytes otherwise than the tiny model's (`tests/fakes/engine.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from tokenizers import Tokenizer, decoders, models

from cache.tokenizer_decoder import TokenizerDecoder

BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_PIECES = ("▁", "a", "b", "▁the", "é", ".", "日", "\ufffd")


def llama_tokenizer() -> Tokenizer:
    """A text's first space is dropped, and bytes stand for what has no piece, such as 你 and all emoji."""
    vocab = {name: token_id for token_id, name in enumerate(("<unk>", *BYTES, *_PIECES))}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["<call>"])
    return tokenizer


class LlamaDecoder(TokenizerDecoder):
    """As the engine has it."""

    def __init__(self) -> None:
        self.tokenizer = llama_tokenizer()
        super().__init__(SimpleNamespace(backend_tokenizer=self.tokenizer))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text.replace(" ", "▁")).ids
        return ids


class SentencePieceDecoder:
    """As SentencePiece itself reads bytes: U+FFFD for each byte of what is no character.

    A token is a byte here; one from 256 on is special.
    """

    def decode(self, token_ids: Sequence[int]) -> str:
        run = bytes(token_id for token_id in token_ids if token_id < 256)
        text = run.decode(errors="surrogateescape")
        return "".join("\ufffd" if "\udc80" <= character <= "\udcff" else character for character in text)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())
