"""How long sequences stay, and so how long a newcomer waits for a place where all are taken.

A replica runs `max_running` sequences at most. With all places taken its queue moves when sequences end,
however short the prompts in it are: by Little's law every `residence / running` seconds.
Knows numbers alone.
"""

from __future__ import annotations

MEAN_OVER = 64  # requests, about, that the mean goes back


class Residence:
    """Seconds that sequences lately ran from their first token to their end."""

    def __init__(self) -> None:
        self.mean_s = 0.0  # 0 while none has ended
        self._num_seen = 0  # up to `MEAN_OVER`

    def observe(self, seconds: float) -> None:
        self._num_seen = min(self._num_seen + 1, MEAN_OVER)
        self.mean_s += (seconds - self.mean_s) / self._num_seen

    def until_ended_s(self, num_sequences: float, num_running: int) -> float:
        """Seconds until so many of those that run have ended."""
        return max(0.0, num_sequences) * self.mean_s / num_running if num_running else 0.0
