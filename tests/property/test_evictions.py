"""What is counted of evictions stays what it is, however long it is counted."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from router.pricing.evictions import FORGET_AFTER, Evictions
from tests.fakes.router import replica_id

ROOMS = st.lists(st.integers(1, 1000), min_size=1, max_size=4)
# (replica, blocks evicted there, their uses, blocks missed then); many are more than the room of all.
STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 3000), st.integers(0, 9000), st.floats(0, 3000)), max_size=60
)


class Plain:
    """The same counts, each made smaller whenever a block is evicted."""

    def __init__(self, rooms: list[int]) -> None:
        self.rooms = rooms
        self.evicted = [0.0] * len(rooms)
        self.uses = [0.0] * len(rooms)
        self.missed = 0.0

    def step(self, index: int, num_evicted: int, num_uses: int, num_missed: float) -> None:
        kept = math.exp(-num_evicted / (FORGET_AFTER * sum(self.rooms)))
        self.evicted = [kept * count for count in self.evicted]
        self.uses = [kept * count for count in self.uses]
        self.evicted[index] += num_evicted
        self.uses[index] += num_uses
        self.missed = kept * self.missed + num_missed

    def regret_of(self, index: int) -> float:
        total = sum(self.evicted)
        if not total:
            return 0.0
        regret = min(1.0, self.missed / total)
        return min(1.0, regret * (self.evicted[index] / self.rooms[index]) / (total / sum(self.rooms)))

    def uses_lost(self, index: int) -> float:
        return self.uses[index] / self.evicted[index] if self.evicted[index] else 0.0


@given(ROOMS, STEPS)
def test_counts_are_those_that_are_made_smaller_each_time(
    rooms: list[int], steps: list[tuple[int, int, int, float]]
) -> None:
    fleet, plain = Evictions(), Plain(rooms)
    for index, room in enumerate(rooms):
        fleet.add(replica_id(index), room)
    for drawn, num_evicted, num_uses, num_missed in steps:
        index = drawn % len(rooms)
        fleet.evicted(replica_id(index), num_evicted, num_uses)
        fleet.missed(num_missed)
        plain.step(index, num_evicted, num_uses, num_missed)
        for each in range(len(rooms)):
            found = fleet.regret_of(replica_id(each))
            assert 0.0 <= found <= 1.0
            assert math.isclose(found, plain.regret_of(each), rel_tol=1e-6, abs_tol=1e-9)
            lost = fleet.uses_lost(replica_id(each))
            assert math.isclose(lost, plain.uses_lost(each), rel_tol=1e-6, abs_tol=1e-9)
