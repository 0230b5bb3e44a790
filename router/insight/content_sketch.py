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

from router.insight.held_memory import Words

_MIXER = np.uint64(0xBF58476D1CE4E5B9)  # splitmix64's finaliser: spreads every bit over the word
_TOP_HALF = np.uint64(32)
_HINT_BITS = np.uint64((1 << 24) - 1)
_CONTENT_BITS = ~_HINT_BITS
_NOT_EMPTY = np.uint64(1 << 24)


class BlockKeys(NamedTuple):
    """Some blocks as the sketch files them: row 0 by content and salt, row 1 by content alone."""

    entries: Words  # what is written, shape (2, n)
    slots: NDArray[np.intp]  # and where, shape (2, n)

    def some(self, part: slice) -> BlockKeys:
        """Those of `part`."""
        return BlockKeys(self.entries[:, part], self.slots[:, part])


class Seen(NamedTuple):
    """What is known of some blocks' contents; each of shape (n,), at most one of them true per block."""

    same_block: NDArray[np.bool_]  # this very block
    diverged: NDArray[np.bool_]  # under this salt, after something else
    other_salt: NDArray[np.bool_]  # under other salts only


class ContentSketch:
    """A bounded memory of contents: two slots of 8 bytes a block, the newest wins.

    An entry is 40 bits of the keyed content, of which the first say the slot, and 24 bits of the block's own
    hint. So one look-up in a million finds what was never there.
    """

    def __init__(self, block_size: int, *, num_slots: int = 1 << 20, secret: bytes | None = None) -> None:
        """num_slots: a power of two; secret: 16 bytes or more, drawn at random unless a test gives it."""
        if num_slots < 2 or num_slots & (num_slots - 1):
            raise ValueError(f"num_slots = {num_slots} is not a power of two")
        self._block_size = block_size
        self._secret = secret if secret is not None else secrets.token_bytes(32)
        self._coefficients = self._draw(block_size)
        self._any_salt = self._word(b"any salt")
        self._last_salt = ("", self._scopes(""))  # most requests carry the same one, or none
        self._shift = np.uint64(64 - (num_slots.bit_length() - 1))
        self._table = np.zeros(num_slots, dtype=np.uint64)  # 0: empty

    @property
    def num_bytes(self) -> int:
        return self._table.nbytes

    def keys(self, token_ids: array[int], hints: Words, first_block: int, cache_salt: str) -> BlockKeys:
        """Full blocks from `first_block` on, as many as there are hints; their tokens must be there. O(n)."""
        if cache_salt != self._last_salt[0]:
            self._last_salt = (cache_salt, self._scopes(cache_salt))
        # Every numpy call costs about as much as 64 blocks do: both rows go through each one together.
        entries = self._contents(token_ids, first_block, first_block + len(hints)) ^ self._last_salt[1]
        entries ^= entries >> _TOP_HALF  # shuffled, so that the top bits make good slots
        entries *= _MIXER
        entries ^= entries >> _TOP_HALF
        entries |= _NOT_EMPTY
        entries &= _CONTENT_BITS
        entries |= hints & _HINT_BITS
        return BlockKeys(entries, (entries >> self._shift).astype(np.intp))

    def look(self, keys: BlockKeys) -> Seen:
        """What was recorded of these blocks. O(n)."""
        difference = self._table[keys.slots] ^ keys.entries
        is_ours, is_known = difference <= _HINT_BITS
        is_same = difference[0] == 0
        return Seen(is_same, is_ours & ~is_same, is_known & ~is_ours)

    def record(self, keys: BlockKeys) -> None:
        """These blocks have been computed. O(n)."""
        self._table[keys.slots] = keys.entries

    def _contents(self, token_ids: array[int], first_block: int, last_block: int) -> Words:
        """A number for each block: equal for equal tokens, and but for chance only for them."""
        size = self._block_size
        tokens = np.array(token_ids[first_block * size : last_block * size], dtype=np.uint64)
        contents: Words = tokens.reshape(-1, size) @ self._coefficients
        return contents

    def _scopes(self, cache_salt: str) -> Words:
        """What to mix into contents for row 0 and row 1, shape (2, 1)."""
        ours = self._word(b"salt" + cache_salt.encode("utf-8", "surrogatepass"))
        return np.array([[ours], [self._any_salt]], dtype=np.uint64)

    def _draw(self, count: int) -> Words:
        stream = hashlib.shake_256(self._secret + b"coefficients").digest(8 * count)
        return np.frombuffer(stream, dtype="<u8").astype(np.uint64)

    def _word(self, text: bytes) -> np.uint64:
        digest = hashlib.blake2b(text, key=self._secret[:64], digest_size=8).digest()
        return np.uint64(int.from_bytes(digest, "little"))
