"""How often newcomers have found no replica free lately. Knows a share alone."""

from __future__ import annotations

OVER = 32  # newcomers, about, that the share goes back


class TakenShare:
    """Of those that came lately, the part that could be started on nowhere at once; 0 at first."""

    def __init__(self) -> None:
        self.value = 0.0

    def note(self, free_part: float) -> None:
        """One more came, and found so much of a replica free, 0 to 1."""
        self.value += (1.0 - free_part - self.value) / OVER
