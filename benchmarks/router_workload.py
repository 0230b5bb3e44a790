"""What a fleet's caches hold, and prompts that find all, half or none of themselves there. Seeded.

Every replica holds conversations of three lengths that begin with one system prompt. A conversation is made
again from its number, so a million blocks need not be kept. Knows tokens; knows neither hashes nor indexes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

BLOCK_SIZE = 16
SYSTEM_BLOCKS = 32
CONVERSATION_BLOCKS = (128, 512, 2048)
VOCABULARY = 150_000
NEW_BLOCKS = 16  # of a next turn: an answer and a question


class Hit(StrEnum):
    """How much of a prompt somebody holds."""

    NONE = "cold"
    HALF = "half"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Fleet:
    """The caches of `num_replicas` replicas with `num_blocks` distinct blocks together."""

    num_replicas: int
    num_blocks: int
    seed: int = 1

    @staticmethod
    def least_blocks(num_replicas: int, num_blocks: int) -> int:
        """Of a fleet so large that one of its conversations holds a prompt of so many blocks."""
        shorter = [length for length in CONVERSATION_BLOCKS if length < num_blocks]
        return SYSTEM_BLOCKS + num_replicas * sum(length - SYSTEM_BLOCKS for length in shorter) + 1

    def conversations(self) -> Iterator[tuple[int, array[int]]]:
        """(replica, tokens) of each, until there are enough blocks."""
        blocks = SYSTEM_BLOCKS
        for number in range(self.num_conversations):
            blocks += self._length(number) - SYSTEM_BLOCKS
            yield number % self.num_replicas, self.conversation(number)

    @property
    def num_conversations(self) -> int:
        left, number = self.num_blocks - SYSTEM_BLOCKS, 0
        while left > 0:
            left -= self._length(number) - SYSTEM_BLOCKS
            number += 1
        return number

    def conversation(self, number: int) -> array[int]:
        own = (self._length(number) - SYSTEM_BLOCKS) * BLOCK_SIZE
        return self._tokens(0, SYSTEM_BLOCKS * BLOCK_SIZE) + self._tokens(1, own, number)

    def prompt(self, num_blocks: int, hit: Hit, number: int) -> array[int]:
        """The number-th prompt of so many full blocks, one token more, of which so much is held somewhere."""
        tokens = num_blocks * BLOCK_SIZE
        if hit is Hit.NONE:
            return self._tokens(2, tokens + 1, num_blocks, number)
        held = self.conversation(self._fitting(num_blocks, number))
        if hit is Hit.ALL:
            return held[:tokens] + self._tokens(3, 1, number)
        return held[: tokens // 2] + self._tokens(3, tokens - tokens // 2 + 1, number)

    def turns(self, num_blocks: int, number: int) -> tuple[array[int], array[int]]:
        """A prompt, and the next turn's of `num_blocks` full blocks, which goes on from it."""
        last = self.prompt(num_blocks - NEW_BLOCKS, Hit.ALL, number)
        return last, last + self._tokens(4, NEW_BLOCKS * BLOCK_SIZE, number)

    def _length(self, number: int) -> int:
        return CONVERSATION_BLOCKS[number // self.num_replicas % len(CONVERSATION_BLOCKS)]

    def _fitting(self, num_blocks: int, number: int) -> int:
        """A conversation that is long enough."""
        wanted = min(length for length in CONVERSATION_BLOCKS if length >= num_blocks)
        fitting = [n for n in range(self.num_conversations) if self._length(n) == wanted]
        return fitting[number * 7919 % len(fitting)]

    def _tokens(self, *key_and_length: int) -> array[int]:
        kind, length, *number = key_and_length
        draw = np.random.default_rng([self.seed, kind, *number])
        return array("i", draw.integers(0, VOCABULARY, length, dtype=np.int32).tobytes())


def as_text(tokens: array[int]) -> str:
    """Four characters a token, as English has: what an index of text is given in place of tokens."""
    return tokens.tobytes().decode("latin-1")
