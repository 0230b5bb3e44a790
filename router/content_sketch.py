"""Which block *contents* were computed, under which salt, whatever came before them in their prompts.

A block hash names a whole prefix, so one token at the top of a prompt (the time, a user's name) gives
every later block another hash although its tokens are the same. This sketch sees them: it remembers what
was in a block apart from what was before it.

    same content, same salt, other hash     the prompts part earlier on: *diverged*
    same content, other salt only           kept apart on purpose, or by a salt that need not be there

Contents are hashed with random coefficients drawn per process (multilinear hashing), so nobody can
choose a content's place, and what is stored means nothing outside. A fixed table: new entries overwrite
old ones, so what is counted is a lower bound.

Knows tokens, hints and salts as numbers; keeps no token. Owner: the router's event loop.
Source: Lemire and Kaser, Strongly universal string hashing is fast, 2014.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.held_memory import Words

_MIXER = np.uint64(0xBF58476D1CE4E5B9)  # splitmix64's finaliser: spreads every bit over the word
_TOP_HALF = np.uint64(32)


class BlockKeys(NamedTuple):
    """Some blocks as the sketch files them. All of shape (n,), in one order."""

    hints: Words  # their own, which name all before them too
    ours: Words  # content under its salt
    our_slots: NDArray[np.intp]
    anyones: Words  # content under whatever salt
    anyones_slots: NDArray[np.intp]

    def some(self, part: slice) -> BlockKeys:
        """Those of `part`."""
        return BlockKeys(
            self.hints[part],
            self.ours[part],
            self.our_slots[part],
            self.anyones[part],
            self.anyones_slots[part],
        )


class Seen(NamedTuple):
    """What is known of some blocks' contents; each of shape (n,), at most one of them true per block."""

    same_block: NDArray[np.bool_]  # this very block
    diverged: NDArray[np.bool_]  # under this salt, after something else
    other_salt: NDArray[np.bool_]  # under other salts only


class ContentSketch:
    """A bounded memory of contents: 16 bytes a slot, two slots a block, the newest wins."""

    def __init__(self, block_size: int, *, num_slots: int = 1 << 20, secret: bytes | None = None) -> None:
        """num_slots: a power of two; secret: 16 bytes or more, drawn at random unless a test gives it."""
        if num_slots < 2 or num_slots & (num_slots - 1):
            raise ValueError(f"num_slots = {num_slots} is not a power of two")
        self._block_size = block_size
        self._secret = secret if secret is not None else secrets.token_bytes(32)
        self._coefficients = self._draw(block_size)
        self._any_salt = self._word(b"any salt")
        self._shift = np.uint64(64 - (num_slots.bit_length() - 1))
        self._tags = np.zeros(num_slots, dtype=np.uint64)  # 0: empty
        self._hints = np.zeros(num_slots, dtype=np.uint64)

    @property
    def num_bytes(self) -> int:
        return self._tags.nbytes + self._hints.nbytes

    def keys(self, token_ids: array[int], hints: Words, first_block: int, salt: np.uint64) -> BlockKeys:
        """Full blocks from `first_block` on, as many as there are hints; their tokens must be there. O(n)."""
        contents = self._contents(token_ids, first_block, first_block + len(hints))
        ours, anyones = _mixed(contents ^ salt), _mixed(contents ^ self._any_salt)
        return BlockKeys(hints, ours, self._slots(ours), anyones, self._slots(anyones))

    def salt_word(self, cache_salt: str) -> np.uint64:
        """A salt as this sketch tells it from others."""
        return self._word(b"salt" + cache_salt.encode("utf-8", "surrogatepass"))

    def look(self, keys: BlockKeys) -> Seen:
        """What was recorded of these blocks. O(n)."""
        is_ours = self._tags[keys.our_slots] == keys.ours
        is_same = is_ours & (self._hints[keys.our_slots] == keys.hints)
        is_known = self._tags[keys.anyones_slots] == keys.anyones
        return Seen(is_same, is_ours & ~is_same, is_known & ~is_ours)

    def record(self, keys: BlockKeys) -> None:
        """These blocks have been computed. O(n)."""
        self._tags[keys.our_slots] = keys.ours
        self._hints[keys.our_slots] = keys.hints
        self._tags[keys.anyones_slots] = keys.anyones

    def _contents(self, token_ids: array[int], first_block: int, last_block: int) -> Words:
        """A number for each block: equal for equal tokens, and but for chance only for them."""
        size = self._block_size
        tokens = np.array(token_ids[first_block * size : last_block * size], dtype=np.uint64)
        blocks: Words = (tokens + np.uint64(1)).reshape(-1, size)
        return blocks @ self._coefficients

    def _slots(self, keys: Words) -> NDArray[np.intp]:
        return (keys >> self._shift).astype(np.intp)

    def _draw(self, count: int) -> Words:
        stream = hashlib.shake_256(self._secret + b"coefficients").digest(8 * count)
        return np.frombuffer(stream, dtype="<u8").astype(np.uint64)

    def _word(self, text: bytes) -> np.uint64:
        digest = hashlib.blake2b(text, key=self._secret[:64], digest_size=8).digest()
        return np.uint64(int.from_bytes(digest, "little"))


def _mixed(words: Words) -> Words:
    """The words shuffled among all words, so that their top bits make good slots; 0, 'empty', is left out."""
    mixed = (words ^ (words >> _TOP_HALF)) * _MIXER
    mixed ^= mixed >> _TOP_HALF
    return mixed | np.uint64(1)
