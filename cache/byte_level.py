"""Byte-level vocabularies: tokens spelled in GPT-2's characters for bytes, and those that only look so.

What is added to such a vocabulary is text and matched as text, but the library's decoder reads it as bytes
where all its characters stand for some: `é]` as the byte E9 and a bracket, which is no text at all.
Knows the tokenizers library by its methods; knows neither requests nor streams.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def from_byte_level(token: str) -> bytes:
    """What a token of the model's own stands for; its text where it has other characters, too."""
    if all(character in _ALPHABET for character in token):
        return bytes(_ALPHABET[character] for character in token)
    return token.encode()


def misread_tokens(backend: Any) -> dict[int, str]:
    """Added tokens by id, with their texts, that the decoder makes something else of. Mostly none.

    backend: a `tokenizers.Tokenizer`. What the model itself has, too, it spells as it spells the others.
    """
    if not any(decoder["type"] == "ByteLevel" for decoder in decoders_of(backend)):
        return {}
    return {
        token_id: token.content
        for token_id, token in backend.get_added_tokens_decoder().items()
        if from_byte_level(token.content) != token.content.encode()
        and backend.model.token_to_id(token.content) is None
    }


def decoders_of(backend: Any) -> Iterator[dict[str, Any]]:
    """The steps of a tokenizer's decoder, as its file has them; none for one without."""
    if backend.decoder is None:
        return
    decoder = json.loads(backend.decoder.__getstate__())  # what pickling it would write: the file's own JSON
    yield from decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones are themselves, others follow from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()
