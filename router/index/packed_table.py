"""A hash table of 64-bit hints to sets of small numbers, packed into flat arrays: 16 bytes a slot.

    key     k | empty | k | ghost | ...   uint64, one per slot
    word    1 | 0     | 5 | 0     | ...   uint64 bit set beside it; one more such array per 64 members more

Linear hashing over segments of fixed size (`linear_hashing.py`), linear probing within a segment: the table
grows by splitting one segment at a time and shrinks by undoing the last split, so that nothing ever rehashes
more than two segments. Its arrays are reserved as address space up to the cap (`columns.py`): growing moves
nothing that is not split, and the gauge is the pages in use.

An entry whose set becomes empty stays as a *ghost*, since others may have been probed past it; a segment with
many ghosts is laid out anew, one or two per call, so that an hour of unique keys costs no memory.

Knows 64-bit keys and member numbers; knows neither replicas nor prefixes. Not thread-safe.
"""

from __future__ import annotations

import random
import secrets
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.index.columns import Columns
from router.index.linear_hashing import SPLITS_END, Keys, LinearHashing, Slots, split_from

Truths = NDArray[np.bool_]

SEGMENT_BITS = 12  # 4,096 slots: splitting one takes a fraction of a millisecond
WORD_BITS = 64
MAX_FILL = 0.9  # of a segment, ghosts included: beyond it a key is refused
SHRINK_SLACK = 1.3  # the table shrinks only if it would still be large enough for so many times its entries
MAX_GHOSTS = 1 / 8  # of a segment: more, and it is laid out anew
TIDY_AFTER = 64  # entries lost: looking costs 5 us
MAX_CHORES = 4  # segments laid out anew, or merged, with one change
MAX_STRETCH = 4  # times as many segments as entries call for, at most, because some segment is too full
NO_ROOM = -1  # instead of a slot
SMALL = 12  # so few keys are faster one by one than as arrays
STRAGGLERS = 12  # so few unsettled probes are
FIXED_BYTES = 4096  # objects, views and the smallest of everything


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
        rng = rng or secrets.SystemRandom()
        self._max_entries = max_entries
        self._hashing = LinearHashing(segment_bits, rng)
        self._bits = segment_bits
        self._slots = 1 << segment_bits  # per segment
        self._in_segment = self._slots - 1
        self._fill_limit = int(MAX_FILL * self._slots)
        # A hint cannot mark what is empty by a value that clients could send: 2 ** -64 that one does.
        self._empty = rng.getrandbits(64)
        self._max_segments = self._hashing.segments_for(max_entries)
        self._used = np.zeros(self._max_segments, np.int64)  # slots of each segment that are not empty
        self._ghosts = np.zeros(self._max_segments, np.int64)  # of those, slots without members
        # Keys lie beside their first words, where a look-up that needs both waits for memory once.
        self._memory = [Columns(self._max_segments << segment_bits, 2)]
        self._keys, self._key_view = self._memory[0].columns[0]
        self._words: list[Keys] = []
        self._word_views: list[memoryview[int]] = []
        self._first_word = memoryview(b"").cast("Q")
        self._more_words: tuple[memoryview[int], ...] = ()
        self._dead: list[int] = []  # per word, members that are being swept away
        self._num_entries = 0
        self._num_untidied = 0  # entries lost since the last look at what is to be tidied
        self._add_word()
        self._open_segment()

    # --- questions ----------------------------------------------------------------------------

    def get(self, hint: int) -> int:
        """The hint's members as a bit set, 0 if there are none. O(1)."""
        inside, keys = self._in_segment, self._key_view
        slot = self._hashing.home(hint)
        base, key = slot & ~inside, keys[slot]
        while key != hint:
            if key == self._empty:
                return 0
            slot = base | slot + 1 & inside
            key = keys[slot]
        if not self._more_words:
            return self._first_word[slot]
        members = self._first_word[slot]
        for index, word in enumerate(self._more_words, start=1):
            members |= word[slot] << WORD_BITS * index
        return members

    def depths(
        self, chain: Sequence[int], members: int, guesses: Sequence[int] = ()
    ) -> list[tuple[int, int]]:
        """(depth, those of `members` in the sets of exactly so many leading hints), shallowest first.

        For a chain (not empty) along which sets only shrink: a stretch with the same set at both ends has it
        throughout, so bisecting what differs finds every depth. Who is not in the first set is left out.
        guesses: places that are tried before the middles, in this order, as far as they are in question.
        O(distinct depths * log(hints)) look-ups.
        """
        # `get`, written out: a call for each look-up would make every match a third slower.
        hashing = self._hashing
        prime, factor, bits, inside = hashing.prime, hashing.factor, hashing.bits, hashing.in_segment
        high, low, num_segments = hashing.high, hashing.low, hashing.num_segments
        keys, empty, first_word, more_words = self._key_view, self._empty, self._first_word, self._more_words
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
        word, bit = self._words[member // WORD_BITS], np.uint64(1 << member % WORD_BITS)
        parts = []
        for start, stop in self._stretches():
            held = np.flatnonzero(word[start:stop] & bit)
            parts.append(self._keys[start:stop][held])
        return np.concatenate(parts)

    @property
    def num_entries(self) -> int:
        """Hints with members, those included that are yet to be swept away."""
        return self._num_entries

    @property
    def num_segments(self) -> int:
        return self._hashing.num_segments

    @property
    def num_words(self) -> int:
        return len(self._words)

    def num_bytes(self) -> int:
        """Memory in use."""
        slots = self.num_segments << self._bits
        return 8 * slots * (1 + len(self._words)) + 16 * self.num_segments + FIXED_BYTES

    # --- changes ------------------------------------------------------------------------------

    def add(self, hints: Sequence[int] | Keys, member: int) -> tuple[Change, Change]:
        """Give these hints the member. What of them did not have it, and what found no room.

        Refused are hints beyond the cap, the last ones first. O(hints), and a share of the growth.
        """
        self._reach(member)
        if len(hints) <= SMALL:
            return self._add_each(_listed(hints), member)
        keys = _distinct(_packed(hints))
        if self._num_entries + len(keys) > self._max_entries:
            return self._add_each(keys.tolist(), member)
        slots, known = self._find(keys)
        added = self._set(slots[known], keys[known], member)
        if known.all():
            return added, NOTHING
        fresh, refused = self._admit(keys[~known])
        self._insert(fresh, member)
        return _sum(added, _change(fresh)), _change(refused)

    def discard(self, hints: Sequence[int] | Keys, member: int) -> tuple[Change, Change]:
        """Take the member from these hints. What of them had it, and what did not. O(hints)."""
        if member // WORD_BITS >= len(self._words):
            return NOTHING, _change(_distinct(_packed(hints)))
        if len(hints) <= SMALL:
            return self._discard_each(_listed(hints), member)
        keys = _distinct(_packed(hints))
        slots, known = self._find(keys)
        word, bit = self._words[member // WORD_BITS], np.uint64(1 << member % WORD_BITS)
        held = known.copy()
        held[known] = (word[slots[known]] & bit) != 0
        where = slots[held]
        word[where] &= ~bit
        self._bury(where[self._memberless(where)])
        self._tidy(len(where))
        return _change(keys[held]), _change(keys[~held])

    def sweep(self, members: int, first_segment: int, num_segments: int) -> None:
        """Take all of these members (a bit set) from every hint in a range of segments. O(its slots).

        Segments are numbered from 0; what is not there is ignored. From the first call until
        `swept`, whatever is laid out anew leaves these members out too.
        """
        self._dead = [members >> WORD_BITS * place & 2**64 - 1 for place in range(len(self._words))]
        start = first_segment << self._bits
        stop = min(first_segment + num_segments, self.num_segments) << self._bits
        if start >= stop:
            return
        touched: list[Slots] = []
        for word, dead in zip(self._words, self._dead, strict=True):
            if dead:
                part = word[start:stop]
                hit = np.flatnonzero(part & np.uint64(dead))
                part[hit] &= np.uint64(~dead & 2**64 - 1)
                touched.append(hit)
        if not touched:
            return
        where = start + (np.unique(np.concatenate(touched)) if len(touched) > 1 else touched[0])
        self._bury(where[self._memberless(where)])
        self._tidy(len(where))

    def swept(self) -> None:
        """Every segment has been swept: the members may be given out again."""
        self._dead = [0] * len(self._words)

    # --- one by one ---------------------------------------------------------------------------

    def _add_each(self, hints: Sequence[int], member: int) -> tuple[Change, Change]:
        word, bit = self._word_views[member // WORD_BITS], 1 << member % WORD_BITS
        num_added = xor_added = num_refused = xor_refused = 0
        for hint in dict.fromkeys(hints):
            slot, known = self._find_one(hint)
            if known and word[slot] & bit:
                continue
            is_entry = known and self._has_members(slot)
            if not is_entry and self._num_entries >= self._max_entries:
                slot = NO_ROOM
            elif not known:
                slot = self._room_for(hint, slot)
            if slot == NO_ROOM:
                xor_refused ^= hint
                num_refused += 1
                continue
            if not known:
                self._key_view[slot] = hint
                self._used[slot >> self._bits] += 1
            elif not is_entry:
                self._ghosts[slot >> self._bits] -= 1
            self._num_entries += not is_entry
            word[slot] |= bit
            xor_added ^= hint
            num_added += 1
        return Change(num_added, xor_added), Change(num_refused, xor_refused)

    def _discard_each(self, hints: Sequence[int], member: int) -> tuple[Change, Change]:
        word, bit = self._word_views[member // WORD_BITS], 1 << member % WORD_BITS
        num_gone = xor_gone = num_unknown = xor_unknown = 0
        for hint in dict.fromkeys(hints):
            slot, known = self._find_one(hint)
            if not (known and word[slot] & bit):
                xor_unknown ^= hint
                num_unknown += 1
                continue
            word[slot] ^= bit
            if not self._has_members(slot):
                self._num_entries -= 1
                self._ghosts[slot >> self._bits] += 1
            xor_gone ^= hint
            num_gone += 1
        self._tidy(num_gone)
        return Change(num_gone, xor_gone), Change(num_unknown, xor_unknown)

    def _find_one(self, hint: int) -> tuple[int, bool]:
        """Where the hint is, or the empty slot where it would be put."""
        return self._probe(hint, self._hashing.home(hint))

    def _probe(self, hint: int, slot: int) -> tuple[int, bool]:
        inside, keys, empty = self._in_segment, self._key_view, self._empty
        base = slot & ~inside
        key = keys[slot]
        while key != hint:
            if key == empty:
                return slot, False
            slot = base | slot + 1 & inside
            key = keys[slot]
        return slot, True

    def _has_members(self, slot: int) -> bool:
        return any([word[slot] for word in self._word_views])

    def _room_for(self, hint: int, slot: int) -> int:
        """The empty slot for a hint that is not there, given the one before growing; or NO_ROOM."""
        if self._grow(self._num_entries + 1):
            slot, _ = self._find_one(hint)
        while self._used[slot >> self._bits] >= self._fill_limit:
            if not self._make_way([slot >> self._bits], 1):
                return NO_ROOM
            slot, _ = self._find_one(hint)
        return slot

    # --- as arrays ----------------------------------------------------------------------------

    def _find(self, keys: Keys) -> tuple[Slots, Truths]:
        """Where each key is, or the first empty slot of its probe; and which of the two."""
        slots = self._hashing.homes(keys)
        seen = self._keys[slots]
        known = seen == keys
        active = np.flatnonzero(~(known | (seen == self._empty)))
        while len(active) > STRAGGLERS:
            nearby = self._next(slots[active])
            slots[active] = nearby
            seen = self._keys[nearby]
            found = seen == keys[active]
            known[active] = found
            active = active[~(found | (seen == self._empty))]
        for index in active.tolist():
            slots[index], known[index] = self._probe(int(keys[index]), int(slots[index]))
        return slots, known

    def _next(self, slots: Slots) -> Slots:
        return slots & ~self._in_segment | slots + 1 & self._in_segment

    def _set(self, slots: Slots, keys: Keys, member: int) -> Change:
        """Add the member to slots whose keys are there; what of them did not have it."""
        word, bit = self._words[member // WORD_BITS], np.uint64(1 << member % WORD_BITS)
        old = word[slots]
        fresh = (old & bit) == 0
        where = slots[fresh]
        risen = where[self._memberless(where)]
        word[where] |= bit
        if len(risen):
            self._num_entries += len(risen)
            self._ghosts[: self.num_segments] -= self._per_segment(risen)
        return _change(keys[fresh])

    def _memberless(self, slots: Slots) -> Truths:
        bare: Truths = self._words[0][slots] == 0
        for word in self._words[1:]:
            bare &= word[slots] == 0
        return bare

    def _per_segment(self, slots: Slots) -> Slots:
        return np.bincount(slots >> self._bits, minlength=self.num_segments)

    def _bury(self, slots: Slots) -> None:
        """These slots have just lost their last member."""
        if len(slots):
            self._num_entries -= len(slots)
            self._ghosts[: self.num_segments] += self._per_segment(slots)

    def _admit(self, keys: Keys) -> tuple[Keys, Keys]:
        """Grow for these new keys; those for whom there is room in their segment, and the others."""
        self._grow(self._num_entries + len(keys))
        while (over := self._overfull(keys)).any():
            # Rare: segments are laid out anew before they have so many ghosts, and keys spread evenly.
            if not self._make_way(np.flatnonzero(over).tolist(), len(keys)):
                break
        refused = keys[:0]
        for segment in np.flatnonzero(over).tolist():
            inside = np.flatnonzero(self._hashing.homes(keys) >> self._bits == segment)[-int(over[segment]) :]
            refused = np.concatenate((refused, keys[inside]))
            keys = np.delete(keys, inside)
        return keys, refused

    def _overfull(self, keys: Keys) -> Slots:
        """By how many keys each segment would be too full with these."""
        filled = self._used[: self.num_segments] + self._per_segment(self._hashing.homes(keys))
        over: Slots = np.maximum(filled - self._fill_limit, 0)
        return over

    def _make_way(self, segments: Sequence[int], num_keys: int) -> bool:
        """Room in these segments: without their ghosts, else by splitting on. False if all is tried."""
        haunted = [segment for segment in segments if self._ghosts[segment]]
        for segment in haunted:
            self._lay_out_anew(segment)
        if haunted:
            return True
        most = min(self._max_segments, MAX_STRETCH * self._hashing.segments_for(self._num_entries + num_keys))
        if self.num_segments >= most:
            return False
        self._split()
        return True

    def _insert(self, keys: Keys, member: int) -> None:
        """Put distinct keys that are not there, for which there is room, with one member each."""
        word, bit = self._words[member // WORD_BITS], np.uint64(1 << member % WORD_BITS)
        slots = self._hashing.homes(keys)
        self._used[: self.num_segments] += self._per_segment(slots)
        self._num_entries += len(keys)
        while len(keys) > STRAGGLERS:
            free = self._keys[slots] == self._empty
            # Several may want one slot: the last one written has it, the others probe on.
            self._keys[slots[free]] = keys[free]
            settled = self._keys[slots] == keys
            word[slots[settled]] = bit
            left = ~settled
            keys, slots = keys[left], self._next(slots[left])
        for key, slot in zip(keys.tolist(), slots.tolist(), strict=True):
            place, _ = self._probe(key, slot)
            self._key_view[place] = key
            word[place] = bit

    # --- growing, shrinking, tidying ----------------------------------------------------------

    def _grow(self, num_entries: int) -> bool:
        """Split segments until there are enough for so many entries. Whether any was."""
        grown = False
        while num_entries > self._hashing.full_at and self.num_segments < self._max_segments:
            self._split()
            grown = True
        return grown

    def _tidy(self, num_changes: int) -> None:
        """So many entries may have become ghosts: lay out anew the segments with most of them, and undo
        splits, as much as that calls for, but no more than takes about a millisecond."""
        self._num_untidied += num_changes
        if self._num_untidied < TIDY_AFTER:
            return
        num_changes, self._num_untidied = self._num_untidied, 0
        limit = MAX_GHOSTS * self._slots
        for _ in range(min(MAX_CHORES, 1 + int(2 * num_changes / limit))):
            worst = int(self._ghosts[: self.num_segments].argmax())
            if self._ghosts[worst] <= limit:
                break
            self._lay_out_anew(worst)
        self._shrink(min(MAX_CHORES, 1 + num_changes // 256))

    def _shrink(self, most: int) -> None:
        for _ in range(most):
            if (
                self.num_segments == 1
                or self._num_entries * SHRINK_SLACK > self._hashing.capacity(self.num_segments - 1)
                or not self._merge()
            ):
                return

    def _split(self) -> None:
        """The next segment in order gives the keys that are the new segment's to a new one."""
        new = self.num_segments
        self._open_segment()
        old = split_from(new)
        keys, words = self._take(old)
        moves = self._hashing.homes(keys) >> self._bits == new
        self._lay_out(new, keys[moves], [word[moves] for word in words])
        stays = ~moves
        self._lay_out(old, keys[stays], [word[stays] for word in words])

    def _merge(self) -> bool:
        """Undo the last split: the last segment's keys go back to where they came from. False if too many."""
        last = self.num_segments - 1
        old = split_from(last)
        keys, words = self._take(last)
        others, other_words = self._take(old)
        if len(keys) + len(others) > SPLITS_END * self._slots:
            self._lay_out(last, keys, words)
            self._lay_out(old, others, other_words)
            return False
        self._hashing.resize(last)
        self._used[last] = self._ghosts[last] = 0
        for memory in self._memory:
            memory.release(last << self._bits, self._slots)
        pairs = zip(words, other_words, strict=True)
        self._lay_out(old, np.concatenate((keys, others)), [np.concatenate(pair) for pair in pairs])
        return True

    def _lay_out_anew(self, segment: int) -> None:
        """Without its ghosts."""
        self._lay_out(segment, *self._take(segment))

    def _take(self, segment: int) -> tuple[Keys, list[Keys]]:
        """Keys and words of a segment's entries, without the members that are being swept away."""
        start = segment << self._bits
        columns = [word[start : start + self._slots] for word in self._words]
        for column, dead in zip(columns, self._dead, strict=True):
            if dead:
                column &= np.uint64(~dead & 2**64 - 1)
        alive = columns[0] != 0
        for column in columns[1:]:
            alive |= column != 0
        # What `sweep` had yet to find here was counted as an entry: neither empty nor a ghost.
        counted = int(self._used[segment] - self._ghosts[segment])
        where = np.flatnonzero(alive)
        self._num_entries -= counted - len(where)
        keys = self._keys[start : start + self._slots][where]
        return keys, [column[where] for column in columns]

    def _lay_out(self, segment: int, keys: Keys, words: Sequence[Keys]) -> None:
        """Write a segment anew: these entries, each as near to its home as linear probing would put it."""
        start, slots = segment << self._bits, self._slots
        homes = self._hashing.homes_within(keys)
        order = np.argsort(homes)
        steps = np.arange(len(order))
        # In the order of their homes, each key's place is its home or the one after its neighbour's.
        places = np.maximum.accumulate(homes[order] - steps) + steps
        num_over = len(places) - int(np.searchsorted(places, slots))
        if num_over:  # the last run goes on at the segment's beginning, in the first slots left free
            taken = np.zeros(slots, np.bool_)
            taken[places[: len(places) - num_over]] = True
            places[len(places) - num_over :] = np.flatnonzero(~taken)[:num_over]
        places += start
        self._keys[start : start + slots] = self._empty
        self._keys[places] = keys[order]
        for column, word in zip(self._words, words, strict=True):
            column[start : start + slots] = 0
            column[places] = word[order]
        self._used[segment] = len(keys)
        self._ghosts[segment] = 0

    def _open_segment(self) -> None:
        start = self.num_segments << self._bits
        self._keys[start : start + self._slots] = self._empty
        for word in self._words:
            word[start : start + self._slots] = 0
        self._hashing.resize(self.num_segments + 1)

    def _reach(self, member: int) -> None:
        while member // WORD_BITS >= len(self._words):
            self._add_word()

    def _add_word(self) -> None:
        """Room for 64 more members. Fresh pages are zeros: nothing is written until somebody is added."""
        if self._words:
            self._memory.append(Columns(self._max_segments << self._bits, 1))
        numbers, view = self._memory[-1].columns[-1]
        self._words.append(numbers)
        self._word_views.append(view)
        self._dead.append(0)
        self._first_word = self._word_views[0]
        self._more_words = tuple(self._word_views[1:])

    def drop_word(self) -> None:
        """Give back the room of the last 64 members, none of whom is in any set."""
        assert len(self._words) > 1
        self._words.pop()
        self._dead.pop()
        self._word_views.pop()
        self._memory.pop()
        self._more_words = self._more_words[:-1]

    def _stretches(self, segments: int = 16) -> Iterator[tuple[int, int]]:
        """All slots in ranges small enough to stay in a processor's cache."""
        for first in range(0, self.num_segments, segments):
            yield first << self._bits, min(first + segments, self.num_segments) << self._bits


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
