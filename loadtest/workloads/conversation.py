"""Prompts that grow: the building material of the generators. Knows lengths and block ids; no times."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


class BlockIds:
    """Numbers no other block has."""

    def __init__(self) -> None:
        self._next = 0

    def fresh(self, count: int = 1) -> tuple[int, ...]:
        first, self._next = self._next, self._next + count
        return tuple(range(first, self._next))


@dataclass(frozen=True, slots=True)
class SharedText:
    """A system prompt or a document that several prompts open with."""

    tokens: int
    block_ids: tuple[int, ...]  # its full blocks; the rest of it lies in each reader's own first block


class Conversation:
    """One session's text so far: what is said stays, and every prompt is all of it."""

    def __init__(self, ids: BlockIds, block_tokens: int, opening: SharedText | None = None) -> None:
        self._ids = ids
        self._block_tokens = block_tokens
        self._tokens = opening.tokens if opening is not None else 0
        self._full: list[int] = list(opening.block_ids) if opening is not None else []

    @property
    def tokens(self) -> int:
        return self._tokens

    def say(self, tokens: int) -> None:
        """A message, an answer or a tool's result is added."""
        self._tokens += tokens
        self._full += self._ids.fresh(self._tokens // self._block_tokens - len(self._full))

    def prompt(self) -> tuple[int, ...]:
        """Block ids of everything said. The partial block is new each time: nobody can share it."""
        tail = self._ids.fresh() if self._tokens % self._block_tokens else ()
        return (*self._full, *tail)


def shared_text(ids: BlockIds, block_tokens: int, tokens: int) -> SharedText:
    return SharedText(tokens, ids.fresh(tokens // block_tokens))


class Zipf:
    """Draws 0..n-1, the k-th most popular with weight 1 / (k + 1) ** exponent."""

    def __init__(self, count: int, exponent: float) -> None:
        self._cumulative = list(accumulate((k + 1) ** -exponent for k in range(count)))
        self._population = range(count)

    def draw(self, rng: random.Random) -> int:
        return rng.choices(self._population, cum_weights=self._cumulative)[0]


def length(rng: random.Random, median: float, spread: float, longest: int = 131_072) -> int:
    """Log-normal tokens, as measured traces have them: at least 1. spread: standard deviation of the log."""
    return max(1, min(longest, round(math.exp(rng.gauss(math.log(median), spread)))))


def pause_s(rng: random.Random, median: float, spread: float) -> float:
    """Log-normal seconds."""
    return math.exp(rng.gauss(math.log(median), spread))


def pick(rng: random.Random, texts: Sequence[SharedText], popularity: Zipf) -> SharedText:
    return texts[popularity.draw(rng)]
