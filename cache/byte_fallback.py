"""Text of tokenizers that spell a character for which they have no token as a token for each of its bytes.

Llama 2, Mistral and Gemma have such (SentencePiece's byte fallback). Knows the tokenizers library; knows
neither requests nor streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

REPLACEMENT = "\ufffd"
_NAMES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_BYTE_BY_NAME = {name: byte for byte, name in enumerate(_NAMES)}


class ByteFallbackDecoder:
    """Reads a run of byte tokens as UTF-8: of an invalid one, too, what is valid.

    The library's own decoder takes a run for text only if all of it is, and makes U+FFFD of each byte
    otherwise: 你 would be there, be gone with the next character's first byte, and come back with its last.
    Valid runs, and what is no byte, are left to it.
    """

    def __init__(
        self, backend: Any, byte_token_ids: frozenset[int], *, skip_special_tokens: bool = True
    ) -> None:
        """backend: a `tokenizers.Tokenizer`. byte_token_ids: what `byte_tokens` says of it."""
        self._backend = backend
        self._byte_token_ids = byte_token_ids
        self._skip_special_tokens = skip_special_tokens
        added = backend.get_added_tokens_decoder().values() if skip_special_tokens else ()
        self._left_out = {token.content for token in added if token.special}

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=self._skip_special_tokens)
        if REPLACEMENT in text and not self._byte_token_ids.isdisjoint(token_ids):  # else all runs are valid
            text = self._backend.decoder.decode(list(_mended(self._visible(token_ids))))
        return text

    def _visible(self, token_ids: Sequence[int]) -> Iterator[str]:
        """The tokens' names: of those that are in texts, as the library itself leaves the others out."""
        for token_id in token_ids:
            name = self._backend.id_to_token(token_id)
            if name is not None and name not in self._left_out:
                yield name


def byte_tokens(backend: Any) -> frozenset[int]:
    """Ids of the tokens that stand for a byte each; none of a tokenizer without byte fallback.

    backend: a `tokenizers.Tokenizer`. Other vocabularies may have tokens of these names, and decode them so.
    """
    found = {name: backend.token_to_id(name) for name in _NAMES}
    ids = {name: token_id for name, token_id in found.items() if token_id is not None}
    halves = [token_id for name, token_id in ids.items() if _BYTE_BY_NAME[name] >= 0x80]
    falls_back = any(backend.decode([each], skip_special_tokens=True) == REPLACEMENT for each in halves)
    return frozenset(ids.values()) if falls_back else frozenset()


def _mended(names: Iterator[str]) -> Iterator[str]:
    """Tokens' names with all runs of bytes valid: U+FFFD stands for what is not, and parts the runs."""
    for is_run, each in groupby(names, _BYTE_BY_NAME.__contains__):
        if is_run:
            for character in bytes(map(_BYTE_BY_NAME.__getitem__, each)).decode(errors="replace"):
                yield from _spelled(character)
        else:
            yield from each


def _spelled(character: str) -> Iterator[str]:
    if character == REPLACEMENT:
        yield character
    else:
        yield from map(_NAMES.__getitem__, character.encode())
