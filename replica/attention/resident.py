"""Keys and values of decodes that stay together, kept side by side from one step to the next.

Gathering every block anew for one more token per sequence costs as much as attending to them. While
the same sequences decode together, only the new token is added to what the last step gathered. The
pages stay the truth: whatever does not continue the step before exactly is gathered from them again.

    age 0     first step of a group: gathered into scratch memory, nothing kept
    age 1     the group stayed together: gathered once more, and kept
    age 2 ..  one row per sequence is added

Knows groups and pages; knows neither masks nor formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from replica.attention.kv_pages import LayerPages
from replica.attention.step_batch import DecodeGroup, StepBatch

# What all layers' groups may keep together. A copy of K/V that the pages hold already: where it does not
# fit, contexts are long, and the time goes into attending rather than gathering.
MAX_RESIDENT_BYTES = 256 << 20

# Blocks of room beyond the longest sequence when a group is gathered, so that it can grow for a while: more
# are read in vain in every step, fewer mean gathering sooner again (132M, batch 32: half a step's time).
HEADROOM_BLOCKS = 3


@dataclass(frozen=True, slots=True)
class GroupAge:
    """How long a group has stayed together, and under which name."""

    lineage: int
    age: int
    group: DecodeGroup


@dataclass(slots=True)
class _Resident:
    """One layer's kept K/V of one group; (size, kv_heads, room, dim) each."""

    keys: torch.Tensor
    values: torch.Tensor
    first_rows: torch.Tensor  # (size, kv_heads): where each head's room begins, among all rows of `dim`
    lineage: int = 0
    age: int = 0  # of the group when the newest row was added

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class ResidentDecodes:
    """Owned by one backend, so by one runner; engine thread only."""

    def __init__(self, max_bytes: int = MAX_RESIDENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._batch: StepBatch | None = None
        self._ages: dict[tuple[int | None, int], GroupAge] = {}  # of this step, by window and place in it
        self._ages_before: dict[tuple[int | None, int], GroupAge] = {}
        self._places: dict[tuple[int, int, int], torch.Tensor] = {}  # of this step
        self._num_lineages = 0
        self._kept: dict[tuple[LayerPages, int], _Resident] = {}
        self._kept_bytes = 0

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
        self, pages: LayerPages, age: GroupAge, index: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """K and V with the step's own rows added, (size, kv_heads, room, dim); None if not kept.

        All the room there is, because it is contiguous: what is beyond a sequence's newest key is zero.
        key, value: the rows of this group, (size, kv_heads, dim).
        """
        kept = self._kept.get((pages, index))
        group = age.group
        if kept is None or (kept.lineage, kept.age + 1) != (age.lineage, age.age):
            return None
        if group.length > kept.keys.shape[2]:
            return None  # outgrown: gathered again, with room
        places = self._places_of(age, kept)
        for memory, new in ((kept.keys, key), (kept.values, value)):
            memory.view(-1, memory.shape[3]).index_copy_(0, places, new.reshape(-1, new.shape[2]))
        kept.age = age.age
        return kept.keys, kept.values

    def keep(
        self, pages: LayerPages, age: GroupAge, index: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Copy what was gathered, (size, kv_heads, keys, dim), if the group stayed together and it fits."""
        if age.age == 0:
            return
        room = (age.group.num_blocks + HEADROOM_BLOCKS) * pages.keys.shape[1]
        shapes = [(*part.shape[:2], room, part.shape[3]) for part in (keys, values)]
        before = self._kept.get((pages, index))
        if before is None or [before.keys.shape, before.values.shape] != shapes:
            self._drop((pages, index))
            if not self._make_room(sum(math.prod(shape) for shape in shapes) * keys.element_size()):
                return
            first_rows = torch.arange(math.prod(keys.shape[:2]), device=keys.device) * room
            before = _Resident(
                keys.new_empty(shapes[0]), values.new_empty(shapes[1]), first_rows.view(keys.shape[:2])
            )
            self._kept[pages, index] = before
            self._kept_bytes += before.num_bytes
        for memory, gathered in ((before.keys, keys), (before.values, values)):
            memory[:, :, : age.group.length] = gathered
            memory[:, :, age.group.length :] = 0  # masked until written, and a masked NaN is still a NaN
        before.lineage, before.age = age.lineage, age.age

    def _places_of(self, age: GroupAge, kept: _Resident) -> torch.Tensor:
        """Where a group's newest rows go among all rows of `dim`; the same in layers of the same shape."""
        name = (age.lineage, kept.keys.shape[1], kept.keys.shape[2])
        places = self._places.get(name)
        if places is None:
            places = self._places[name] = (kept.first_rows + age.group.places[:, None]).view(-1)
        return places

    def _make_room(self, num_bytes: int) -> bool:
        """Whether so many more fit, once groups that are no more have been let go."""
        if self._kept_bytes + num_bytes > self._max_bytes:
            alive = {age.lineage for age in self._ages.values()}
            for place in [place for place, kept in self._kept.items() if kept.lineage not in alive]:
                self._drop(place)
        return self._kept_bytes + num_bytes <= self._max_bytes

    def _drop(self, place: tuple[LayerPages, int]) -> None:
        kept = self._kept.pop(place, None)
        if kept is not None:
            self._kept_bytes -= kept.num_bytes

    def _next_age(self, batch: StepBatch, window: int | None, index: int) -> GroupAge:
        group = batch.decode_groups(window)[index]
        before = self._ages_before.get((window, index))
        if before is not None and group.continues(before.group):
            return GroupAge(before.lineage, before.age + 1, group)
        self._num_lineages += 1
        return GroupAge(self._num_lineages, 0, group)
