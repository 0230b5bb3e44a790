"""Time that passes only when somebody sleeps: for engines on paper, whose steps take what a model says."""

from __future__ import annotations


class VirtualClock:
    """Called, it is a clock; a simulated runner sleeps on it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
