"""A tokenizer's way back: the text of token ids, the same wherever one is told.

An engine's answers and a Router's `echo` and `/detokenize` are made here. Knows the tokenizers library by its
methods; knows neither requests nor streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cache.byte_fallback import ByteFallbackDecoder, byte_tokens


class TokenizerDecoder:
    """Over a transformers tokenizer: nothing cleaned up."""

    def __init__(self, tokenizer: Any, *, spells_special: bool = False) -> None:
        """spells_special: special tokens are in the text by their names; else they are left out."""
        skips = not spells_special
        # The Rust tokenizer itself where there is one: its wrapper costs ten times the decoding.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._decode: Callable[[list[int]], str]
        if backend is None:
            self._decode = lambda ids: tokenizer.decode(
                ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False
            )
        elif byte_token_ids := byte_tokens(backend):
            self._decode = ByteFallbackDecoder(backend, byte_token_ids, skip_special_tokens=skips).decode
        else:
            self._decode = lambda ids: backend.decode(ids, skip_special_tokens=skips)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._decode(list(token_ids))
