"""How many requests wait at some replicas, and at how many: a slow one's as parts of a typical one's.

    two of three replicas have no queue; two requests wait at the third, which is ten times slower:
    waiting = 2 / 10,  replicas = 2 + 1 / 10

A second of work delays whoever comes behind it until the queue is empty again, and so many come as the
replica has a part in what the fleet computes. Were a slow one's queue counted whole, computing again would
grow dear for the others (`RecomputeCharge`), and who has a prefix there would wait for it there.
Values: know numbers alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from router.pricing.replica_state import ReplicaState

# Times as slow as a typical one, at the most: a sum of floats keeps nothing of a part that is much smaller.
MOST_SLOW = 1e6


class FleetQueue(NamedTuple):
    """Sums, so that one replica's change is O(1)."""

    waiting: float = 0.0  # requests
    replicas: float = 0.0

    def beside(self, state: ReplicaState) -> FleetQueue:
        """With that replica."""
        part = _part(state)
        return FleetQueue(self.waiting + part * state.num_waiting, self.replicas + part)

    def without(self, state: ReplicaState) -> FleetQueue:
        """It is one of them."""
        part = _part(state)
        return FleetQueue(self.waiting - part * state.num_waiting, self.replicas - part)

    def mean(self, num_held: float) -> float:
        """Requests per replica, with so many that wait elsewhere for any of them. At least one is there."""
        return max(0.0, self.waiting + num_held) / self.replicas


def queue_of(states: Iterable[ReplicaState]) -> FleetQueue:
    """O(states)."""
    queue = FleetQueue()
    for state in states:
        queue = queue.beside(state)
    return queue


def _part(state: ReplicaState) -> float:
    """Of a typical replica; one that is quicker is one as well."""
    return 1.0 / min(max(1.0, state.slowness), MOST_SLOW)
