"""A tokenizer's way back: the text of token ids, the same wherever one is told.

An engine's answers and a Router's `echo` and `/detokenize` are made here. Knows the tokenizers library by its
methods; knows neither requests nor streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from cache.byte_fallback import ByteFallbackDecoder, byte_tokens
from cache.byte_level import misread_tokens


class TokenizerDecoder:
    """Over a transformers tokenizer: nothing cleaned up."""

    def __init__(self, tokenizer: Any, *, spells_special: bool = False) -> None:
        """spells_special: special tokens are in the text by their names; else they are left out."""
        skips = not spells_special
        # The Rust tokenizer itself where there is one: its wrapper costs ten times the decoding.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._decode: Callable[[list[int]], str]
        if backend is None:
            self._decode = _WithoutUnknown(
                lambda ids: tokenizer.decode(
                    ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False
                )
            ).decode
        elif byte_token_ids := byte_tokens(backend):
            self._decode = ByteFallbackDecoder(backend, byte_token_ids, skip_special_tokens=skips).decode
        else:
            self._decode = lambda ids: backend.decode(ids, skip_special_tokens=skips)
            if misread := _misread(backend, skips_special=skips):
                self._decode = _ByRuns(self._decode, misread).decode

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._decode(list(token_ids))


class _WithoutUnknown:
    """Ids that stand for nothing are left out, as the Rust library does. Tokenizers in Python raise what they
    like at them, and models have some: their heads are wider than the vocabulary."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode

    def decode(self, token_ids: list[int]) -> str:
        try:
            return self._decode(token_ids)
        except Exception:
            known = [token_id for token_id in token_ids if self._is_known(token_id)]
            if len(known) == len(token_ids):
                raise
            return self._decode(known)

    def _is_known(self, token_id: int) -> bool:
        try:
            self._decode([token_id])
        except Exception:
            return False
        return True


class _ByRuns:
    """Added tokens as their text, and what is between them as the library has it."""

    def __init__(self, decode: Callable[[list[int]], str], texts: Mapping[int, str]) -> None:
        self._decode = decode
        self._texts = texts

    def decode(self, token_ids: list[int]) -> str:
        if self._texts.keys().isdisjoint(token_ids):
            return self._decode(token_ids)
        parts = []
        for is_added, run in groupby(token_ids, self._texts.__contains__):
            ids = list(run)
            parts += [self._texts[token_id] for token_id in ids] if is_added else [self._decode(ids)]
        return "".join(parts)


def _misread(backend: Any, *, skips_special: bool) -> dict[int, str]:
    added = backend.get_added_tokens_decoder()
    return {
        token_id: text
        for token_id, text in misread_tokens(backend).items()
        if not (skips_special and added[token_id].special)
    }
