"""Slots for keys and their words, in segments that are split, merged and laid out anew one at a time.

    key     k | empty | k | ghost | ...   uint64, one per slot
    word    1 | 0     | 5 | 0     | ...   uint64 beside it; one more such array for each further word

Linear hashing over segments of fixed size (`linear_hashing.py`), linear probing within a segment: slots grow
by splitting one segment at a time and shrink by undoing the last split, so that nothing ever rehashes more
than two segments. The arrays are reserved as address space up to the cap (`columns.py`): growing moves
nothing that is not split, and the gauge is the pages in use.

A key whose words have all become zero stays as a *ghost*, since others may have been probed past it; a
segment with many ghosts is laid out anew, one or two per call, so that an hour of unique keys costs no
memory.

Knows keys, words and which of them are zero; knows nothing of what a bit stands for. Not thread-safe.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

try:
    import router.native.changes as compiled
except ModuleNotFoundError:  # no C compiler where this was installed: slots are found one by one, in Python
    compiled = None  # type: ignore[assignment]

from router.index.columns import Columns
from router.index.linear_hashing import SPLITS_END, Keys, LinearHashing, Slots, split_from

Truths = NDArray[np.bool_]
IS_COMPILED = compiled is not None  # whether bits are set and cleared in C

SEGMENT_BITS = 12  # 4,096 slots: splitting one takes a fraction of a millisecond
MAX_FILL = 0.9  # of a segment, ghosts included: beyond it a key is refused
SHRINK_SLACK = 1.3  # segments are merged only if there would still be room for so many times the entries
MAX_GHOSTS = 1 / 8  # of a segment: more, and it is laid out anew
TIDY_AFTER = 64  # entries lost: looking costs 5 us
MAX_CHORES = 4  # segments laid out anew, or merged, with one change
MAX_STRETCH = 4  # times as many segments as entries call for, at most, because some segment is too full
NO_ROOM = -1  # instead of a slot
STRAGGLERS = 12  # so few unsettled probes are faster one by one than as arrays
FIXED_BYTES = 4096  # objects, views and the smallest of everything


class Segments:
    """Entries: keys with a word that is not zero.

    What is public is read-only outside this module, but for the words of slots that were found here: whoever
    changes those says which entries came of it, and which went.
    """

    def __init__(self, max_entries: int, segment_bits: int, rng: random.Random) -> None:
        """max_entries: address space is reserved for them. rng: draws the secrets."""
        self.max_entries = max_entries
        self.hashing = LinearHashing(segment_bits, rng)
        self.bits = segment_bits
        self.slots = 1 << segment_bits  # per segment
        self.in_segment = self.slots - 1
        self._fill_limit = int(MAX_FILL * self.slots)
        # A hint cannot mark what is empty by a value that clients could send: 2 ** -64 that one does.
        self.empty = rng.getrandbits(64)
        self._max_segments = self.hashing.segments_for(max_entries)
        self._used = np.zeros(self._max_segments, np.int64)  # slots of each segment that are not empty
        self._ghosts = np.zeros(self._max_segments, np.int64)  # of those, slots without members
        # Keys lie beside their first words, where a look-up that needs both waits for memory once.
        self._memory = [Columns(self._max_segments << segment_bits, 2)]
        self.keys, self.key_view = self._memory[0].columns[0]
        self.words: list[Keys] = []
        self.word_views: tuple[memoryview[int], ...] = ()
        self.first_word = memoryview(b"").cast("Q")
        self.more_words: tuple[memoryview[int], ...] = ()
        self._dead: list[int] = []  # per word, bits that are being swept away
        self.num_entries = 0  # those included that are yet to be swept away
        self._num_untidied = 0  # entries lost since the last look at what is to be tidied
        self.add_word()
        self._open_segment()

    @property
    def num_segments(self) -> int:
        return self.hashing.num_segments

    def num_bytes(self) -> int:
        """Memory in use."""
        slots = self.num_segments << self.bits
        return 8 * slots * (1 + len(self.words)) + 16 * self.num_segments + FIXED_BYTES

    def stretches(self, segments: int = 16) -> Iterator[tuple[int, int]]:
        """All slots in ranges small enough to stay in a processor's cache."""
        for first in range(0, self.num_segments, segments):
            yield first << self.bits, min(first + segments, self.num_segments) << self.bits

    # --- where -------------------------------------------------------------------------------

    def find_one(self, hint: int) -> tuple[int, bool]:
        """Where the hint is, or the empty slot where it would be put."""
        return self.probe(hint, self.hashing.home(hint))

    def probe(self, hint: int, slot: int) -> tuple[int, bool]:
        inside, keys, empty = self.in_segment, self.key_view, self.empty
        base = slot & ~inside
        key = keys[slot]
        while key != hint:
            if key == empty:
                return slot, False
            slot = base | slot + 1 & inside
            key = keys[slot]
        return slot, True

    def find(self, keys: Keys) -> tuple[Slots, Truths]:
        """Where each key is, or the first empty slot of its probe; and which of the two."""
        slots = self.hashing.homes(keys)
        seen = self.keys[slots]
        known = seen == keys
        active = np.flatnonzero(~(known | (seen == self.empty)))
        while len(active) > STRAGGLERS:
            nearby = self._next(slots[active])
            slots[active] = nearby
            seen = self.keys[nearby]
            found = seen == keys[active]
            known[active] = found
            active = active[~(found | (seen == self.empty))]
        for index in active.tolist():
            slots[index], known[index] = self.probe(int(keys[index]), int(slots[index]))
        return slots, known

    def _next(self, slots: Slots) -> Slots:
        return slots & ~self.in_segment | slots + 1 & self.in_segment

    def has_words(self, slot: int) -> bool:
        return any([word[slot] for word in self.word_views])

    def wordless(self, slots: Slots) -> Truths:
        bare: Truths = self.words[0][slots] == 0
        for word in self.words[1:]:
            bare &= word[slots] == 0
        return bare

    # --- what changes -------------------------------------------------------------------------

    @property
    def takes_marks(self) -> bool:
        """Whether `mark` and `unmark` are there: in C, and for so many words."""
        return IS_COMPILED and len(self.words) <= compiled.MOST_WORDS

    def mark(self, keys: array[int], bit: int) -> tuple[int, int, int]:
        """Set a bit of these keys' words, up to the first key for which that takes more than a slot.

        bit: among all words. (How many were looked at, how many of them had it not, the XOR of those.)
        """
        grow_at = self.hashing.full_at if self.num_segments < self._max_segments else self.max_entries
        num_done, self.num_entries, num_new, xor = compiled.add(
            keys, bit, self._all(), self.max_entries, grow_at, self._fill_limit
        )
        return num_done, num_new, xor

    def unmark(self, keys: array[int], bit: int) -> tuple[int, int, int, int]:
        """Clear it. How many of these had it, their XOR, and the same of those that had it not.

        keys: distinct. Whoever calls sees to it that things are tidied.
        """
        self.num_entries, *found = compiled.discard(keys, bit, self._all())
        num_gone, xor_gone, num_unknown, xor_unknown = found
        return num_gone, xor_gone, num_unknown, xor_unknown

    def _all(self) -> compiled.All:
        """What is compiled takes of a table."""
        hashing, words = self.hashing.numbers, self.word_views
        return hashing, self.empty, self.key_view, words, self._used, self._ghosts, self.num_entries

    def claim(self, key: int, slot: int, is_ghost: bool) -> int:
        """The slot of an entry-to-be whose first word the caller writes; NO_ROOM if there is none.

        slot: what `find_one` gave for the key, which has no words yet.
        """
        if self.num_entries >= self.max_entries:
            return NO_ROOM
        if is_ghost:
            self._ghosts[slot >> self.bits] -= 1
        else:
            slot = self._room_for(key, slot)
            if slot == NO_ROOM:
                return NO_ROOM
            self.key_view[slot] = key
            self._used[slot >> self.bits] += 1
        self.num_entries += 1
        return slot

    def bury_one(self, slot: int) -> None:
        """The slot has just lost the last of its words."""
        self.num_entries -= 1
        self._ghosts[slot >> self.bits] += 1

    def rise(self, slots: Slots) -> None:
        """These slots, ghosts until now, have words again."""
        if len(slots):
            self.num_entries += len(slots)
            self._ghosts[: self.num_segments] -= self._per_segment(slots)

    def bury(self, slots: Slots) -> None:
        """These slots have just lost the last of their words."""
        if len(slots):
            self.num_entries -= len(slots)
            self._ghosts[: self.num_segments] += self._per_segment(slots)

    def insert(self, keys: Keys) -> Slots:
        """Slots for distinct keys that have none, for which there is room. Their words are the caller's."""
        slots = self.hashing.homes(keys)
        self._used[: self.num_segments] += self._per_segment(slots)
        self.num_entries += len(keys)
        active = np.arange(len(keys))
        while len(active) > STRAGGLERS:
            places, wanted = slots[active], keys[active]
            free = self.keys[places] == self.empty
            # Several may want one slot: the last one written has it, the others probe on.
            self.keys[places[free]] = wanted[free]
            left = self.keys[places] != wanted
            active = active[left]
            slots[active] = self._next(places[left])
        for index in active.tolist():
            place, _ = self.probe(int(keys[index]), int(slots[index]))
            self.key_view[place] = int(keys[index])
            slots[index] = place
        return slots

    def sweep(self, dead: Sequence[int], first_segment: int, num_segments: int) -> None:
        """Take these bits, as many sets of them as there are words, from the words of a range of segments.

        From the first call until `swept`, whatever is laid out anew leaves them out too. O(slots).
        """
        self._dead = list(dead)
        start = first_segment << self.bits
        stop = min(first_segment + num_segments, self.num_segments) << self.bits
        if start >= stop:
            return
        touched: list[Slots] = []
        for word, bits in zip(self.words, dead, strict=True):
            if bits:
                part = word[start:stop]
                hit = np.flatnonzero(part & np.uint64(bits))
                part[hit] &= np.uint64(~bits & 2**64 - 1)
                touched.append(hit)
        if not touched:
            return
        where = start + (np.unique(np.concatenate(touched)) if len(touched) > 1 else touched[0])
        self.bury(where[self.wordless(where)])
        self.tidy(len(where))

    def swept(self) -> None:
        """Every segment has been swept."""
        self._dead = [0] * len(self.words)

    # --- room --------------------------------------------------------------------------------

    def _room_for(self, hint: int, slot: int) -> int:
        """The empty slot for a hint that is not there, given the one before growing; or NO_ROOM."""
        if self._grow(self.num_entries + 1):
            slot, _ = self.find_one(hint)
        while self._used[slot >> self.bits] >= self._fill_limit:
            if not self._make_way([slot >> self.bits], 1):
                return NO_ROOM
            slot, _ = self.find_one(hint)
        return slot

    def admit(self, keys: Keys) -> tuple[Keys, Keys]:
        """Grow for these new keys; those for whom there is room in their segment, and the others."""
        self._grow(self.num_entries + len(keys))
        while (over := self._overfull(keys)).any():
            # Rare: segments are laid out anew before they have so many ghosts, and keys spread evenly.
            if not self._make_way(np.flatnonzero(over).tolist(), len(keys)):
                break
        refused = keys[:0]
        for segment in np.flatnonzero(over).tolist():
            inside = np.flatnonzero(self.hashing.homes(keys) >> self.bits == segment)[-int(over[segment]) :]
            refused = np.concatenate((refused, keys[inside]))
            keys = np.delete(keys, inside)
        return keys, refused

    def _overfull(self, keys: Keys) -> Slots:
        """By how many keys each segment would be too full with these."""
        filled = self._used[: self.num_segments] + self._per_segment(self.hashing.homes(keys))
        over: Slots = np.maximum(filled - self._fill_limit, 0)
        return over

    def _make_way(self, segments: Sequence[int], num_keys: int) -> bool:
        """Room in these segments: without their ghosts, else by splitting on. False if all is tried."""
        haunted = [segment for segment in segments if self._ghosts[segment]]
        for segment in haunted:
            self._lay_out_anew(segment)
        if haunted:
            return True
        most = min(self._max_segments, MAX_STRETCH * self.hashing.segments_for(self.num_entries + num_keys))
        if self.num_segments >= most:
            return False
        self._split()
        return True

    def _per_segment(self, slots: Slots) -> Slots:
        return np.bincount(slots >> self.bits, minlength=self.num_segments)

    # --- growing, shrinking, tidying ----------------------------------------------------------

    def _grow(self, num_entries: int) -> bool:
        """Split segments until there are enough for so many entries. Whether any was."""
        grown = False
        while num_entries > self.hashing.full_at and self.num_segments < self._max_segments:
            self._split()
            grown = True
        return grown

    def tidy(self, num_changes: int) -> None:
        """So many entries may have become ghosts: lay out anew the segments with most of them, and undo
        splits, as much as that calls for, but no more than takes about a millisecond."""
        self._num_untidied += num_changes
        if self._num_untidied < TIDY_AFTER:
            return
        num_changes, self._num_untidied = self._num_untidied, 0
        limit = MAX_GHOSTS * self.slots
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
                or self.num_entries * SHRINK_SLACK > self.hashing.capacity(self.num_segments - 1)
                or not self._merge()
            ):
                return

    def _split(self) -> None:
        """The next segment in order gives the keys that are the new segment's to a new one."""
        new = self.num_segments
        self._open_segment()
        old = split_from(new)
        keys, words = self._take(old)
        moves = self.hashing.homes(keys) >> self.bits == new
        self._lay_out(new, keys[moves], [word[moves] for word in words])
        stays = ~moves
        self._lay_out(old, keys[stays], [word[stays] for word in words])

    def _merge(self) -> bool:
        """Undo the last split: the last segment's keys go back to where they came from. False if too many."""
        last = self.num_segments - 1
        old = split_from(last)
        keys, words = self._take(last)
        others, other_words = self._take(old)
        if len(keys) + len(others) > SPLITS_END * self.slots:
            self._lay_out(last, keys, words)
            self._lay_out(old, others, other_words)
            return False
        self.hashing.resize(last)
        self._used[last] = self._ghosts[last] = 0
        for memory in self._memory:
            memory.release(last << self.bits, self.slots)
        pairs = zip(words, other_words, strict=True)
        self._lay_out(old, np.concatenate((keys, others)), [np.concatenate(pair) for pair in pairs])
        return True

    def _lay_out_anew(self, segment: int) -> None:
        """Without its ghosts."""
        self._lay_out(segment, *self._take(segment))

    def _take(self, segment: int) -> tuple[Keys, list[Keys]]:
        """Keys and words of a segment's entries, without the members that are being swept away."""
        start = segment << self.bits
        columns = [word[start : start + self.slots] for word in self.words]
        for column, dead in zip(columns, self._dead, strict=True):
            if dead:
                column &= np.uint64(~dead & 2**64 - 1)
        alive = columns[0] != 0
        for column in columns[1:]:
            alive |= column != 0
        # What `sweep` had yet to find here was counted as an entry: neither empty nor a ghost.
        counted = int(self._used[segment] - self._ghosts[segment])
        where = np.flatnonzero(alive)
        self.num_entries -= counted - len(where)
        keys = self.keys[start : start + self.slots][where]
        return keys, [column[where] for column in columns]

    def _lay_out(self, segment: int, keys: Keys, words: Sequence[Keys]) -> None:
        """Write a segment anew: these entries, each as near to its home as linear probing would put it."""
        start, slots = segment << self.bits, self.slots
        homes = self.hashing.homes_within(keys)
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
        self.keys[start : start + slots] = self.empty
        self.keys[places] = keys[order]
        for column, word in zip(self.words, words, strict=True):
            column[start : start + slots] = 0
            column[places] = word[order]
        self._used[segment] = len(keys)
        self._ghosts[segment] = 0

    def _open_segment(self) -> None:
        start = self.num_segments << self.bits
        self.keys[start : start + self.slots] = self.empty
        for word in self.words:
            word[start : start + self.slots] = 0
        self.hashing.resize(self.num_segments + 1)

    # --- words --------------------------------------------------------------------------------

    def add_word(self) -> None:
        """Room for 64 more members. Fresh pages are zeros: nothing is written until somebody is added."""
        if self.words:
            self._memory.append(Columns(self._max_segments << self.bits, 1))
        numbers, view = self._memory[-1].columns[-1]
        self.words.append(numbers)
        self.word_views = (*self.word_views, view)
        self._dead.append(0)
        self.first_word = self.word_views[0]
        self.more_words = self.word_views[1:]

    def drop_word(self) -> None:
        """Give back the room of the last 64 members, none of whom is in any set."""
        assert len(self.words) > 1
        self.words.pop()
        self._dead.pop()
        self.word_views = self.word_views[:-1]
        self._memory.pop()
        self.more_words = self.more_words[:-1]
