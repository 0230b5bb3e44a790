"""Replicas as small numbers, so that a set of them is one integer.

A number is given out again only when its former owner's entries are gone: until then it is neither live nor
free. Knows replica names; knows neither hints nor load. Owner: the router's event loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache.types import ReplicaId

MAX_NAMED_SETS = 4096  # sets whose names are kept ready: fleets hold few different sets, and often the same
MAX_BEGINNINGS = 256
MEMBER_BYTES, NAMED_SET_BYTES, BEGINNING_BYTES = 300, 300, 2000


class Members:
    """Numbers from 0, as few as there have been replicas at one time."""

    def __init__(self) -> None:
        self.live = 0  # those that are replicas, as a bit set
        self.num_numbers = 0  # ever given out
        self._free: list[int] = []
        self._names: dict[int, ReplicaId] = {}
        self._named_sets: dict[int, tuple[ReplicaId, ...]] = {}
        self._beginnings: dict[tuple[int, int], dict[ReplicaId, int]] = {}

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def add(self, replica_id: ReplicaId, *, is_live: bool = True) -> int:
        """A number for it. is_live: now, and not from `rename` on."""
        member = self.add_unnamed()
        self._names[member] = replica_id
        self.live |= is_live << member
        self._forget_names()
        return member

    def add_unnamed(self) -> int:
        """A number that is no replica's, and not among the live ones."""
        if not self._free:
            self._free.append(self.num_numbers)
            self.num_numbers += 1
        member = min(self._free)  # low ones first, so that the high ones can be withdrawn
        self._free.remove(member)
        return member

    def remove(self, member: int) -> None:
        """It is no replica any more; its number stays taken until `free`."""
        del self._names[member]
        self.live &= ~(1 << member)
        self._forget_names()

    def rename(self, member: int, replica_id: ReplicaId) -> None:
        """The number is this replica's now, and live."""
        self._names[member] = replica_id
        self.live |= 1 << member
        self._forget_names()

    def withdraw(self, first: int) -> bool:
        """Forget the numbers from `first` on, if all of them are free. Whether they were."""
        above = [member for member in self._free if member >= first]
        if len(above) != self.num_numbers - first:
            return False
        self._free = [member for member in self._free if member < first]
        self.num_numbers = first
        return True

    def free(self, member: int) -> None:
        """Nothing is left of it: the number may be given out again."""
        self._free.append(member)

    def depths(self, groups: Sequence[tuple[int, int]]) -> dict[ReplicaId, int]:
        """(depth, bit set of live members), shallowest first -> the depth at which each is met last."""
        if not groups:
            return {}
        found = self._begin(groups[0])
        for depth, members in groups[1:]:
            found.update(dict.fromkeys(self.names(members), depth))
        return found

    def _begin(self, group: tuple[int, int]) -> dict[ReplicaId, int]:
        """Mostly nearly everybody, at one depth: those who hold a system prompt and no more."""
        beginning = self._beginnings.get(group)
        if beginning is None:
            if len(self._beginnings) >= MAX_BEGINNINGS:
                self._beginnings.clear()
            beginning = dict.fromkeys(self.names(group[1]), group[0])
            self._beginnings[group] = beginning
        return beginning.copy()

    def names(self, members: int) -> tuple[ReplicaId, ...]:
        """Of a set of live members."""
        names = self._named_sets.get(members)
        if names is None:
            if len(self._named_sets) >= MAX_NAMED_SETS:
                self._named_sets.clear()
            names = tuple([self._names[member] for member in numbers(members)])
            self._named_sets[members] = names
        return names

    def num_bytes(self) -> int:
        ready = NAMED_SET_BYTES * len(self._named_sets) + BEGINNING_BYTES * len(self._beginnings)
        return MEMBER_BYTES * len(self._names) + ready

    def _forget_names(self) -> None:
        self._named_sets.clear()
        self._beginnings.clear()


def numbers(members: int) -> list[int]:
    """The members of a bit set, ascending."""
    return [number for number, bit in enumerate(reversed(bin(members)[2:])) if bit == "1"]
