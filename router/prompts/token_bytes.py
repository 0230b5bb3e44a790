"""The bytes a single token stands for, from how its tokenizer spells and decodes.

A token need not be whole characters, so decoding it by itself shows U+FFFD where bytes are wanted, and many
decoders strip a leading space there. Knows tokenizers' files; knows neither prompts nor answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes_of(tokenizer: Any) -> Callable[[int], bytes]:
    """A pure function of token ids below the vocabulary's size; b"" for a hole in it.

    tokenizer: a transformers tokenizer. What is special stands for its own name. Other tokens that were added
    do not: decoders read them as any token, and Gemma's runs of spaces are among them, spelled as words are.
    """
    added = tokenizer.added_tokens_decoder.items()
    special = {token_id: str(token).encode() for token_id, token in added if token.special}
    decoders = list(_decoders(tokenizer))
    kinds = {decoder["type"] for decoder in decoders}
    if "ByteLevel" in kinds:
        spell = _from_byte_level
    elif decoders and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        replaced = dict(filter(None, map(_replacement, decoders)))

        def spell(token: str) -> bytes:
            if "ByteFallback" in kinds and (match := _BYTE_TOKEN.fullmatch(token)):
                return bytes([int(match[1], 16)])
            for old, new in replaced.items():
                token = token.replace(old, new)
            return token.encode()

    else:
        return lambda token_id: special.get(token_id) or _decoded(tokenizer, token_id)

    def of(token_id: int) -> bytes:
        if token_id in special:
            return special[token_id]
        token = tokenizer.convert_ids_to_tokens(token_id)
        return spell(token) if token else b""

    return of


def _decoded(tokenizer: Any, token_id: int) -> bytes:
    text: str = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    return text.encode()


def _decoders(tokenizer: Any) -> Iterator[dict[str, Any]]:
    """The steps of a tokenizer's decoder, as its file has them; none for one without."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return
    decoder = json.loads(backend.decoder.__getstate__())  # what pickling it would write: the file's own JSON
    yield from decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _replacement(decoder: dict[str, Any]) -> tuple[str, str] | None:
    if decoder["type"] == "Metaspace":
        return decoder["replacement"], " "
    if decoder["type"] == "Replace" and "String" in decoder["pattern"]:
        return decoder["pattern"]["String"], decoder["content"]
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones are themselves, others follow from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _from_byte_level(token: str) -> bytes:
    if all(character in _ALPHABET for character in token):
        return bytes(_ALPHABET[character] for character in token)
    return token.encode()
