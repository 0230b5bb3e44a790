"""A rate as a bucket: so much fits, it fills evenly, and who takes more than is there waits.

It may go below zero, for what is only known afterwards (the tokens of an answer): the debt is filled first.
Over any time t no more is taken, in amounts that are asked for before, than a full bucket + t times the rate
+ what went below zero. Knows numbers; knows no clock of its own.
"""

from __future__ import annotations


class TokenBucket:
    """Holds one minute's worth. Owner: the router's event loop."""

    __slots__ = ("_at", "_level", "capacity", "rate")

    def __init__(self, per_minute: float, now: float) -> None:
        """Full. per_minute: above 0; less than one a minute still leaves room for one."""
        self.rate = per_minute / 60.0  # a second
        self.capacity = max(1.0, per_minute)
        self._level = self.capacity
        self._at = now

    def resize(self, per_minute: float, now: float) -> None:
        """Another rate from now on. Who had used up their share of the old one has used it up of the new.

        A debt stays as it is, and is filled at the new rate.
        """
        level, before = self.level(now), self.capacity
        self.rate = per_minute / 60.0
        self.capacity = max(1.0, per_minute)
        self._level = level * self.capacity / before if level > 0.0 else level

    def level(self, now: float) -> float:
        """What is there. Below zero: debt."""
        if now > self._at:
            self._level = min(self.capacity, self._level + (now - self._at) * self.rate)
            self._at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken; 0 = now. More than ever fits needs a full bucket."""
        missing = min(amount, self.capacity) - self.level(now)
        return max(0.0, missing / self.rate)

    def take(self, amount: float, now: float) -> None:
        """Whether it is there or not; a negative amount gives back."""
        self._level = min(self.capacity, self.level(now) - amount)

    def full_in_s(self, now: float) -> float:
        """Seconds until nothing is missing."""
        return max(0.0, (self.capacity - self.level(now)) / self.rate)
