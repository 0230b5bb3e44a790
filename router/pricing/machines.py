"""Machines that several replicas compute on, and what one that begins takes from the others there.

    two cores, four engines of one thread     a: 8 sequences   b: 1   c: -   d: -
    a newcomer at `a` or `b`                  is in steps that are computed anyway
    a newcomer at `c`                         has steps of its own, and `a` and `b` wait for them

A step costs `base_s` however many sequences are in it. Where engines have a machine each, a newcomer that has
steps of its own delays nobody; where they share one, the others' cores compute them. So replicas of one
machine are quicker together than apart.
Knows who has work; knows neither requests nor what is cached.
"""

from __future__ import annotations

from typing import Protocol

from cache.events import StepTimeModel


class Sharer(Protocol):
    """A replica, as its machine knows it."""

    def neighbours_changed(self) -> None:
        """Another one of its machine has begun to work, or has ended."""


class Machine:
    """What some replicas share, and which of them have work."""

    def __init__(self) -> None:
        self._sharers: set[Sharer] = set()
        self._busy: set[Sharer] = set()

    def enter(self, sharer: Sharer) -> None:
        self._sharers.add(sharer)

    def leave(self, sharer: Sharer) -> None:
        """Nothing happens if it has left."""
        self.note(sharer, is_busy=False)
        self._sharers.discard(sharer)

    def note(self, sharer: Sharer, *, is_busy: bool) -> None:
        """It has work, or none. O(1), and O(sharers) where that is new."""
        if is_busy is (sharer in self._busy) or sharer not in self._sharers:
            return
        (self._busy.add if is_busy else self._busy.remove)(sharer)
        for other in self._sharers:
            if other is not sharer:
                other.neighbours_changed()

    def crowding(self, sharer: Sharer, num_engines: float) -> float:
        """Of what this one computes, the part that the others wait for: 0, while there is room, to 1.

        num_engines: such as this one that the machine computes at once, none slowing another.
        """
        num_others = len(self._busy) - (sharer in self._busy)
        return min(1.0, max(0.0, num_others + 1 - num_engines))


def alone_s(model: StepTimeModel, decode_s: float, num_requests: int, residence_s: float) -> float:
    """Seconds that an engine computes longer for a newcomer's answer: for what a step costs anyway.

    decode_s: what sequences add to its steps. num_requests: before the newcomer. residence_s: a sequence runs
    so long from its first token, on average.

    An engine computes until the last of its sequences ends. If n stay for exponential times of one mean, the
    last of n + 1 ends mean / (n + 1) after the last of n; of that time `base_s` is what a step costs anyway.
    """
    decode_s = decode_s or model.per_token_s + model.per_sequence_s
    step_s = model.base_s + decode_s
    return residence_s / (num_requests + 1) * model.base_s / step_s if step_s else 0.0
