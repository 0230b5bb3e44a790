"""Keys and values of decodes that stay together, kept side by side from one step to the next.

Gathering every block anew for one more token per sequence costs as much as attending to them. While
the same sequences decode together, only the new token is added to what the last step gathered. The
pages stay the truth: whatever does not continue the step before exactly is gathered from them again.

    age 0     first step of a group: gathered into scratch memory, nothing kept
    age 1     the group stayed together: gathered once more, and kept
    age 2 ..  one row per sequence is added
    age 4 ..  where asked for, the keys are turned so that each number of all tokens lies side by side
              (`wide_decode.py`), one layer after the other: turning one takes what two to five steps save

What has no more room is moved to where there is more, one layer a step as well: no step is much longer than
those around it.

Knows groups and pages; knows neither masks nor formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from replica.attention.kv_pages import LayerPages
from replica.attention.spare_memory import SpareMemory
from replica.attention.step_batch import DecodeGroup, StepBatch

# What all layers' groups may keep together, with all memory behind it. A copy of K/V that the pages hold
# already: where it does not fit, contexts are long, and the time goes into attending rather than gathering.
# Pieces of memory are larger than what is in them, so that it can grow, in the first half of this alone.
MAX_RESIDENT_BYTES = 256 << 20

# Blocks of room beyond the longest sequence when a group is kept or moved, so that it can grow for a while:
# more are read in vain in every step, fewer mean moving sooner again.
HEADROOM_BLOCKS = 4

TURNED_AGE = 4  # of a group, when the first of its layers is turned
MOST_TURNS = 16  # steps over which layers are turned, or moved


@dataclass(frozen=True, slots=True)
class GroupAge:
    """How long a group has stayed together, and under which name."""

    lineage: int
    age: int
    group: DecodeGroup


@dataclass(frozen=True, slots=True)
class _Side:
    """The kept keys, or values, of one layer and group."""

    memory: torch.Tensor  # (size, kv_heads, room, dim)
    is_turned: bool  # (size, kv_heads, dim, room) is what is contiguous of it
    storage: torch.Tensor  # what it is the front of
    flat: torch.Tensor  # rows of `dim`; turned: numbers
    heads: tuple[int, ...]  # (size, kv_heads): how many begin a row of `room`; turned: (size, kv_heads, dim)

    @classmethod
    def of(cls, rows: torch.Tensor, length: int, room: int, storage: torch.Tensor, *, turned: bool) -> _Side:
        """In `storage` a copy of the first `length` of (size, kv_heads, keys, dim), with room for so many."""
        size, kv_heads, _, dim = rows.shape
        heads = (size, kv_heads, dim) if turned else (size, kv_heads)
        front = storage[: _count(rows, room)]
        memory = front.view(size, kv_heads, dim, room).mT if turned else front.view(size, kv_heads, room, dim)
        memory[:, :, :length].copy_(rows[:, :, :length])
        memory[:, :, length:].zero_()  # masked until written; a masked NaN is still a NaN
        return cls(memory, turned, storage, front if turned else front.view(-1, dim), heads)

    @property
    def room(self) -> int:
        return self.memory.shape[2]


@dataclass(slots=True)
class _Resident:
    """One layer's kept K/V of one group."""

    keys: _Side
    values: _Side
    turn: int  # among the layers, below `MOST_TURNS`
    lineage: int
    age: int  # of the group when the newest row was added

    @property
    def num_bytes(self) -> int:
        return self.keys.storage.nbytes + self.values.storage.nbytes


class ResidentDecodes:
    """Owned by one backend, so by one runner; engine thread only."""

    def __init__(self, max_bytes: int = MAX_RESIDENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._batch: StepBatch | None = None
        self._ages: dict[tuple[int | None, int], GroupAge] = {}  # of this step, by window and place in it
        self._ages_before: dict[tuple[int | None, int], GroupAge] = {}
        self._places: dict[tuple[int, tuple[int, ...], int], torch.Tensor] = {}  # of this step
        self._num_lineages = 0
        self._kept: dict[tuple[LayerPages, int], _Resident] = {}
        self._kept_bytes = 0
        self._spare = SpareMemory()
        self._layers: dict[LayerPages, int] = {}  # numbered as they come: they take turns

    def begin(self, batch: StepBatch) -> None:
        """Told of every step, decodes or not, before anything else; again for each layer.

        Only the step right before counts: a group that reappears after a pause may be other requests
        under the same ids, in blocks that were written anew.
        """
        if batch is not self._batch:
            self._batch = batch
            self._ages_before, self._ages = self._ages, {}
            self._places.clear()

    def age_of(self, batch: StepBatch, window: int | None, index: int) -> GroupAge:
        """The age of the step's group number `index` in layers with this window."""
        known = self._ages.get((window, index))
        if known is None:
            known = self._ages[window, index] = self._next_age(batch, window, index)
        return known

    def added(
        self,
        pages: LayerPages,
        age: GroupAge,
        index: int,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        turns: bool,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """K and V with the step's own rows added, (size, kv_heads, room, dim); None if not kept.

        All the room there is, because it is contiguous: what is beyond a sequence's newest key is zero.
        key, value: the rows of this group, (size, kv_heads, dim).
        turns: whether keys are to be turned: then (size, kv_heads, dim, room) is what is contiguous of them.
        """
        kept = self._kept.get((pages, index))
        group = age.group
        if kept is None or (kept.lineage, kept.age + 1) != (age.lineage, age.age):
            return None
        if group.length >= kept.keys.room - kept.turn:
            self._move(kept, self._room_of(pages, group))
            if group.length > kept.keys.room:
                self._drop((pages, index))
                return None
        if turns and not kept.keys.is_turned and age.age >= TURNED_AGE + kept.turn:
            kept.keys = self._replaced(kept.keys, kept.keys.room, turned=True)
        for side, new in ((kept.keys, key), (kept.values, value)):
            side.flat.index_copy_(0, self._places_of(age, side), new.reshape(-1, *side.flat.shape[1:]))
        kept.age = age.age
        return kept.keys.memory, kept.values.memory

    def keep(
        self, pages: LayerPages, age: GroupAge, index: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Copy what was gathered, (size, kv_heads, keys, dim), if the group stayed together and it fits."""
        if age.age == 0:
            return
        self._drop((pages, index))
        length, room = age.group.length, self._room_of(pages, age.group)
        needed = (keys.nbytes + values.nbytes) // length * room
        if not self._make_room(needed):
            return
        beyond = self._beyond(needed) // 2
        # Below a block: so many tokens before it is outgrown a layer is moved, and all to the same room.
        turn = self._layers.setdefault(pages, len(self._layers)) % min(MOST_TURNS, pages.keys.shape[1])
        kept = _Resident(
            _Side.of(keys, length, room, self._taken(keys, room, beyond), turned=False),
            _Side.of(values, length, room, self._taken(values, room, beyond), turned=False),
            turn,
            age.lineage,
            age.age,
        )
        self._kept[pages, index] = kept

    def _room_of(self, pages: LayerPages, group: DecodeGroup) -> int:
        return (group.num_blocks + HEADROOM_BLOCKS) * pages.keys.shape[1]

    def _move(self, kept: _Resident, room: int) -> None:
        """To so much room, if that is more and fits."""
        length = kept.keys.room
        if room <= length:
            return
        needed = (kept.keys.memory.nbytes + kept.values.memory.nbytes) // length * room
        if self._make_room(needed - kept.num_bytes):
            kept.keys = self._replaced(kept.keys, room, turned=kept.keys.is_turned)
            kept.values = self._replaced(kept.values, room, turned=False)

    def _replaced(self, side: _Side, room: int, *, turned: bool) -> _Side:
        """What takes its place, with all that it holds; while that is copied there are both."""
        self._kept_bytes -= side.storage.nbytes
        beyond = self._beyond(_count(side.memory, room) * side.memory.itemsize)
        storage = self._taken(side.memory, room, beyond)
        other = _Side.of(side.memory, side.room, room, storage, turned=turned)
        self._spare.give_back(side.storage)
        return other

    def _taken(self, rows: torch.Tensor, room: int, beyond: int) -> torch.Tensor:
        """Memory for (size, kv_heads, room, dim), and at most so many bytes beyond that."""
        count = _count(rows, room)
        storage = self._spare.take(rows, count, count + beyond // rows.itemsize)
        self._kept_bytes += storage.nbytes
        return storage

    def _beyond(self, num_bytes: int) -> int:
        """Bytes that may be taken beside so many, for what grows."""
        return max(0, self._max_bytes // 2 - self._kept_bytes - num_bytes)

    def _places_of(self, age: GroupAge, side: _Side) -> torch.Tensor:
        """Where in `flat` a group's newest go; the same in many layers."""
        name = (age.lineage, side.heads, side.room)
        places = self._places.get(name)
        if places is None:
            firsts = torch.arange(math.prod(side.heads), device=side.flat.device).view(side.heads) * side.room
            own = age.group.places.view(-1, *[1] * (len(side.heads) - 1))
            places = self._places[name] = (firsts + own).view(-1)
        return places

    def _make_room(self, num_bytes: int) -> bool:
        """Whether so many more fit. Groups that are no more are let go once there is no room to grow."""
        if self._kept_bytes + num_bytes > self._max_bytes // 2:
            # Of the step before, too: who goes on in this one may not have been asked about yet.
            alive = {age.lineage for age in (*self._ages.values(), *self._ages_before.values())}
            for place in [place for place, kept in self._kept.items() if kept.lineage not in alive]:
                self._drop(place)
        return self._kept_bytes + num_bytes <= self._max_bytes

    def _drop(self, place: tuple[LayerPages, int]) -> None:
        kept = self._kept.pop(place, None)
        if kept is not None:
            self._kept_bytes -= kept.num_bytes
            self._spare.give_back(kept.keys.storage)
            self._spare.give_back(kept.values.storage)

    def _next_age(self, batch: StepBatch, window: int | None, index: int) -> GroupAge:
        group = batch.decode_groups(window)[index]
        before = self._ages_before.get((window, index))
        if before is not None and group.continues(before.group):
            return GroupAge(before.lineage, before.age + 1, group)
        self._num_lineages += 1
        return GroupAge(self._num_lineages, 0, group)


def _count(rows: torch.Tensor, room: int) -> int:
    """Numbers in (size, kv_heads, room, dim); rows: (size, kv_heads, any, dim)."""
    size, kv_heads, _, dim = rows.shape
    return size * kv_heads * room * dim
