"""How often newcomers have found no replica free lately: whether another's work delays anybody.

Values: know states and shares alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.pricing.replica_state import ReplicaState

OVER = 32  # newcomers, about, that the share goes back


class TakenShare:
    """Of those that came lately, the part that could be started on nowhere at once; 0 at first."""

    def __init__(self) -> None:
        self.value = 0.0

    def note(self, free_part: float) -> None:
        """One more came, and found so much of a replica free, 0 to 1."""
        self.value += (1.0 - free_part - self.value) / OVER


def free_part(states: Iterable[ReplicaState], now: float) -> float:
    """Of a typical replica, as much as would start on a newcomer at once, 0 to 1. O(states) if all are busy.

    A slow one is a part of one, and one that would take its time from other engines of its machine is none.
    """
    most = 0.0
    for state in states:
        if state.busy_until > now or (state.price is not None and state.price.alone_s > 0):
            continue
        if state.slowness <= 1.0:
            return 1.0
        most = max(most, 1.0 / state.slowness)
    return most
