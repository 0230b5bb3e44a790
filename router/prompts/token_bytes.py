"""The bytes a single token stands for, from how its tokenizer spells and decodes.

A token need not be whole characters, so decoding it by itself shows U+FFFD where bytes are wanted, and many
decoders strip a leading space there. Knows tokenizers' files; knows neither prompts nor answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cache.byte_level import decoders_of, from_byte_level, misread_tokens

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes_of(tokenizer: Any) -> Callable[[int], bytes]:
    """A pure function of token ids below the vocabulary's size; b"" for a hole in it.

    tokenizer: a transformers tokenizer. What is special stands for its own name. Other tokens that were added
    do not: decoders read them as any token, and Gemma's runs of spaces are among them, spelled as words are.
    """
    added = tokenizer.added_tokens_decoder.items()
    as_text = {token_id: str(token).encode() for token_id, token in added if token.special}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoders = [] if backend is None else list(decoders_of(backend))
    kinds = {decoder["type"] for decoder in decoders}
    if "ByteLevel" in kinds:
        as_text |= {token_id: text.encode() for token_id, text in misread_tokens(backend).items()}
        spell = from_byte_level
    elif decoders and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        replaced = dict(filter(None, map(_replacement, decoders)))

        def spell(token: str) -> bytes:
            if "ByteFallback" in kinds and (match := _BYTE_TOKEN.fullmatch(token)):
                return bytes([int(match[1], 16)])
            for old, new in replaced.items():
                token = token.replace(old, new)
            return token.encode()

    else:
        return lambda token_id: as_text.get(token_id) or _decoded(tokenizer, token_id)

    def of(token_id: int) -> bytes:
        if token_id in as_text:
            return as_text[token_id]
        token = tokenizer.convert_ids_to_tokens(token_id)
        return spell(token) if token else b""

    return of


def _decoded(tokenizer: Any, token_id: int) -> bytes:
    text: str = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    return text.encode()


def _replacement(decoder: dict[str, Any]) -> tuple[str, str] | None:
    if decoder["type"] == "Metaspace":
        return decoder["replacement"], " "
    if decoder["type"] == "Replace" and "String" in decoder["pattern"]:
        return decoder["pattern"]["String"], decoder["content"]
    return None
