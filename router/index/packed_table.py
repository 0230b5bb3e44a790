"""A hash table of 64-bit hints to sets of small numbers, packed into flat arrays: 16 bytes a slot.

A set is a bit set in the words beside its hint's key (`segments.py`): member 0 is the lowest bit of the first
word, member 64 the lowest of the second. Few hints go one by one, many as arrays.

Knows 64-bit keys and member numbers; knows neither replicas nor prefixes. Not thread-safe.
"""

from __future__ import annotations

import random
import secrets
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

try:
    import router.native.depths as compiled
except ModuleNotFoundError:  # no C compiler where this was installed: the same, by a loop in Python
    compiled = None  # type: ignore[assignment]

from router.index.linear_hashing import Keys, Slots
from router.index.segments import NO_ROOM, SEGMENT_BITS, Segments

WORD_BITS = 64
IS_COMPILED = compiled is not None  # whether chains are matched in C
SMALL = 12  # so few keys are faster one by one than as arrays, in Python
FEW = 512  # ... and in C; of thousands the members are taken faster as arrays


class Change(NamedTuple):
    """Of a set of hints: how many, and their XOR."""

    num_hints: int
    xor: int


NOTHING = Change(0, 0)


class PackedTable:
    """`hint -> set of members` (numbers from 0), as bit sets. A hint without members is not there."""

    def __init__(
        self, max_entries: int, *, segment_bits: int = SEGMENT_BITS, rng: random.Random | None = None
    ) -> None:
        """max_entries: further hints are refused. rng: draws the secrets; the system's if None."""
        self._at = Segments(max_entries, segment_bits, rng or secrets.SystemRandom())

    # --- questions ----------------------------------------------------------------------------

    def get(self, hint: int) -> int:
        """The hint's members as a bit set, 0 if there are none. O(1)."""
        at = self._at
        slot, known = at.find_one(hint)
        if not known:
            return 0
        members = at.first_word[slot]
        for index, word in enumerate(at.more_words, start=1):
            members |= word[slot] << WORD_BITS * index
        return members

    def depths(
        self, chain: Sequence[int], members: int, guesses: tuple[int, ...] = ()
    ) -> list[tuple[int, int]]:
        """(depth, those of `members` in the sets of exactly so many leading hints), shallowest first.

        For a chain (not empty) along which sets only shrink: a stretch with the same set at both ends has it
        throughout, so bisecting what differs finds every depth. Who is not in the first set is left out.
        guesses: places that are tried before the middles, in this order, as far as they are in question.
        O(distinct depths * log(hints)) look-ups.
        """
        at = self._at
        words = at.word_views
        if (
            IS_COMPILED
            and len(words) <= compiled.MOST_WORDS
            and len(guesses) <= compiled.MOST_GUESSES
            and isinstance(chain, memoryview)
        ):
            return compiled.depths(chain, members, guesses, at.hashing.numbers, at.empty, at.key_view, words)
        return self.interpreted_depths(chain, members, guesses)

    def interpreted_depths(
        self, chain: Sequence[int], members: int, guesses: tuple[int, ...] = ()
    ) -> list[tuple[int, int]]:
        """`depths` without what is compiled, which does as this does, and with any number of members."""
        at = self._at
        # `get`, written out: a call for each look-up would make every match a third slower.
        hashing = at.hashing
        prime, factor, bits, inside = hashing.prime, hashing.factor, hashing.bits, hashing.in_segment
        high, low, num_segments = hashing.high, hashing.low, hashing.num_segments
        keys, empty, first_word, more_words = at.key_view, at.empty, at.first_word, at.more_words
        found: list[tuple[int, int]] = []
        deeper: list[tuple[int, int, int, int]] = []  # stretches to come to, the shallowest on top
        untried = [*reversed(guesses), len(chain) - 1]
        # The stretch at hand: all hold what is before the first hint, nobody holds what is after the last.
        left, at_left, right, at_right, middle = -1, members, len(chain), 0, 0
        while True:
            hint = chain[middle]
            place = hint % prime * factor % prime
            segment = place >> bits & high
            if segment >= num_segments:
                segment &= low
            slot = segment << bits | place & inside
            key = keys[slot]
            while key != hint and key != empty:
                slot = slot & ~inside | slot + 1 & inside
                key = keys[slot]
            if key == hint:
                held = first_word[slot]
                if more_words:
                    for index, word in enumerate(more_words, start=1):
                        held |= word[slot] << WORD_BITS * index
                held = held & at_left | at_right
            else:
                held = at_right
            if not middle:
                left, at_left = 0, held
                if not held:
                    return found
            elif held == at_left:
                left = middle
            else:
                if held != at_right:
                    deeper.append((middle, held, right, at_right))
                right, at_right = middle, held
            while right - left == 1:
                if at_left != at_right:
                    found.append((right, at_left ^ at_right))
                if not deeper:
                    return found
                left, at_left, right, at_right = deeper.pop()
            middle = left + right >> 1
            while untried:
                wanted = untried.pop()
                if left < wanted < right:
                    middle = wanted
                    break

    def hints_of(self, member: int) -> Keys:
        """Every hint that has this member, in no order. O(slots)."""
        if member // WORD_BITS >= len(self._at.words):
            return np.zeros(0, np.uint64)
        word, bit = self._at.words[member // WORD_BITS], np.uint64(1 << member % WORD_BITS)
        parts = []
        for start, stop in self._at.stretches():
            held = np.flatnonzero(word[start:stop] & bit)
            parts.append(self._at.keys[start:stop][held])
        return np.concatenate(parts)

    @property
    def num_entries(self) -> int:
        """Hints with members, those included that are yet to be swept away."""
        return self._at.num_entries

    @property
    def num_segments(self) -> int:
        return self._at.num_segments

    @property
    def num_words(self) -> int:
        return len(self._at.words)

    def num_bytes(self) -> int:
        """Memory in use."""
        return self._at.num_bytes()

    # --- changes ------------------------------------------------------------------------------

    def add(self, hints: Sequence[int] | Keys, member: int) -> tuple[Change, Change]:
        """Give these hints the member. What of them did not have it, and what found no room.

        Refused are hints beyond the cap, the last ones first. O(hints), and a share of the growth.
        """
        self._reach(member)
        if len(hints) <= FEW and self._at.takes_marks:
            return self._mark(hints, member)
        if len(hints) <= SMALL:
            return self._add_each(_listed(hints), member)
        keys = _distinct(_packed(hints))
        at = self._at
        if at.num_entries + len(keys) > at.max_entries:
            return self._add_each(keys.tolist(), member)
        slots, known = at.find(keys)
        added = self._set(slots[known], keys[known], member)
        if known.all():
            return added, NOTHING
        fresh, refused = at.admit(keys[~known])
        slots = at.insert(fresh)
        at.words[member // WORD_BITS][slots] = 1 << member % WORD_BITS
        return _sum(added, _change(fresh)), _change(refused)

    def discard(self, hints: Sequence[int] | Keys, member: int) -> tuple[Change, Change]:
        """Take the member from these hints. What of them had it, and what did not. O(hints)."""
        at = self._at
        if member // WORD_BITS >= len(at.words):
            return NOTHING, _change(_distinct(_packed(hints)))
        if len(hints) <= FEW and at.takes_marks:
            return self._unmark(hints, member)
        if len(hints) <= SMALL:
            return self._discard_each(_listed(hints), member)
        keys = _distinct(_packed(hints))
        slots, known = at.find(keys)
        word, bit = at.words[member // WORD_BITS], np.uint64(1 << member % WORD_BITS)
        held = known.copy()
        held[known] = (word[slots[known]] & bit) != 0
        where = slots[held]
        word[where] &= ~bit
        at.bury(where[at.wordless(where)])
        at.tidy(len(where))
        return _change(keys[held]), _change(keys[~held])

    def sweep(self, members: int, first_segment: int, num_segments: int) -> None:
        """Take all of these members (a bit set) from every hint in a range of segments. O(its slots).

        Segments are numbered from 0; what is not there is ignored. From the first call until
        `swept`, whatever is laid out anew leaves these members out too.
        """
        bits = [members >> WORD_BITS * place & 2**64 - 1 for place in range(self.num_words)]
        self._at.sweep(bits, first_segment, num_segments)

    def swept(self) -> None:
        """Every segment has been swept: the members may be given out again."""
        self._at.swept()

    # --- one by one ---------------------------------------------------------------------------

    def _mark(self, hints: Sequence[int] | Keys, member: int) -> tuple[Change, Change]:
        keys = array("Q", dict.fromkeys(_listed(hints)))
        added, refused = NOTHING, NOTHING
        while True:
            num_done, num_added, xor = self._at.mark(keys, member)
            added = _sum(added, Change(num_added, xor))
            if num_done == len(keys):
                return added, refused
            more_added, more_refused = self._add_each((keys[num_done],), member)
            added, refused = _sum(added, more_added), _sum(refused, more_refused)
            del keys[: num_done + 1]

    def _unmark(self, hints: Sequence[int] | Keys, member: int) -> tuple[Change, Change]:
        keys = array("Q", dict.fromkeys(_listed(hints)))
        num_gone, xor_gone, num_unknown, xor_unknown = self._at.unmark(keys, member)
        self._at.tidy(num_gone)
        return Change(num_gone, xor_gone), Change(num_unknown, xor_unknown)

    def _add_each(self, hints: Sequence[int], member: int) -> tuple[Change, Change]:
        at = self._at
        word, bit = at.word_views[member // WORD_BITS], 1 << member % WORD_BITS
        num_added = xor_added = num_refused = xor_refused = 0
        for hint in dict.fromkeys(hints):
            slot, known = at.find_one(hint)
            if known and word[slot] & bit:
                continue
            if not (known and at.has_words(slot)):
                slot = at.claim(hint, slot, known)
            if slot == NO_ROOM:
                xor_refused ^= hint
                num_refused += 1
                continue
            word[slot] |= bit
            xor_added ^= hint
            num_added += 1
        return Change(num_added, xor_added), Change(num_refused, xor_refused)

    def _discard_each(self, hints: Sequence[int], member: int) -> tuple[Change, Change]:
        at = self._at
        word, bit = at.word_views[member // WORD_BITS], 1 << member % WORD_BITS
        num_gone = xor_gone = num_unknown = xor_unknown = 0
        for hint in dict.fromkeys(hints):
            slot, known = at.find_one(hint)
            if not (known and word[slot] & bit):
                xor_unknown ^= hint
                num_unknown += 1
                continue
            word[slot] ^= bit
            if not at.has_words(slot):
                at.bury_one(slot)
            xor_gone ^= hint
            num_gone += 1
        at.tidy(num_gone)
        return Change(num_gone, xor_gone), Change(num_unknown, xor_unknown)

    # --- the parts ----------------------------------------------------------------------------

    def _set(self, slots: Slots, keys: Keys, member: int) -> Change:
        """Add the member to slots whose keys are there; what of them did not have it."""
        at = self._at
        word, bit = at.words[member // WORD_BITS], np.uint64(1 << member % WORD_BITS)
        fresh = (word[slots] & bit) == 0
        where = slots[fresh]
        risen = where[at.wordless(where)]
        word[where] |= bit
        at.rise(risen)
        return _change(keys[fresh])

    def _reach(self, member: int) -> None:
        while member // WORD_BITS >= len(self._at.words):
            self._at.add_word()

    def drop_word(self) -> None:
        """Give back the room of the last 64 members, none of whom is in any set."""
        self._at.drop_word()


def _packed(hints: Sequence[int] | Keys) -> Keys:
    """As an array; what is packed already is not copied."""
    if isinstance(hints, list | tuple):
        return np.frombuffer(array("Q", hints), np.uint64)
    return np.asarray(hints, np.uint64)


def _listed(hints: Sequence[int] | Keys) -> Sequence[int]:
    return hints if isinstance(hints, list | tuple) else np.asarray(hints, np.uint64).tolist()


def _distinct(keys: Keys) -> Keys:
    """Each once, in order of first appearance."""
    ordered = np.sort(keys)
    if not (ordered[1:] == ordered[:-1]).any():
        return keys
    return keys[np.sort(np.unique(keys, return_index=True)[1])]


def _change(keys: Keys) -> Change:
    return Change(len(keys), int(np.bitwise_xor.reduce(keys))) if len(keys) else NOTHING


def _sum(one: Change, other: Change) -> Change:
    return Change(one.num_hints + other.num_hints, one.xor ^ other.xor)
