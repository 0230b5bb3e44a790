"""Prompts made from block ids: equal exactly as far as the ids are, in token ids or in text.

A block's content follows from its id and a salt: another salt, and no cache has seen any of it. Knows
neither times nor servers.
"""

from __future__ import annotations

import random
from array import array
from functools import lru_cache
from typing import Protocol

from loadtest.scenarios.words import text
from loadtest.workloads.request import WorkRequest

# Ids that any vocabulary has, the built-in model's and the simulated one's too; special tokens lie below.
FIRST_TOKEN, LAST_TOKEN = 100, 999
_KEPT_BLOCKS = 8192  # contents made lately: a hot prefix is not made anew for each of its requests


class PromptMaker(Protocol):
    def prompt(self, request: WorkRequest) -> list[int] | str: ...


class TokenPrompts:
    """Exact: as many tokens as the request has, block by block."""

    def __init__(self, block_tokens: int, salt: str) -> None:
        self._block_tokens = block_tokens
        self._salt = salt
        self._block = lru_cache(_KEPT_BLOCKS)(self._made)

    def prompt(self, request: WorkRequest) -> list[int]:
        tokens = [token for block_id in request.block_ids for token in self._block(block_id)]
        return tokens[: request.input_tokens]

    def _made(self, block_id: int) -> array[int]:
        draw = random.Random(f"{self._salt}/{block_id}")
        return array("h", draw.choices(range(FIRST_TOKEN, LAST_TOKEN + 1), k=self._block_tokens))


class TextPrompts:
    """For servers that take no token ids: so many words that they are about as many tokens."""

    def __init__(self, block_tokens: int, salt: str, *, tokens_per_word: float) -> None:
        """tokens_per_word: of the served model's tokenizer, as `calibration.py` measures it."""
        self._salt = salt
        self._tokens_per_word = tokens_per_word
        self._block_words = max(1, round(block_tokens / tokens_per_word))

    def prompt(self, request: WorkRequest) -> str:
        num_words = max(1, round(request.input_tokens / self._tokens_per_word))
        words: list[str] = []
        for block_id in request.block_ids:
            words += text(f"{self._salt}/{block_id}", self._block_words).split()
        return " ".join(words[:num_words])
