"""How many replicas are wanted for the work there is. Pure: numbers in, a number out; knows no Serve.

Up, when more waits than `target_queued_s` a replica, or they are busier than `target_busy`: to as many as
bring both back, at most to twice as many as run, since what they will then do is seen only when they run.
Both are asked, because neither is enough. A queue says nothing of how much fewer would do: with a tenth too
many replicas it is empty, with a tenth too few it grows for ever, or to what Routers let wait. Being busy
says nothing of how much more is needed: it ends at 1. What Routers refuse would make others busy, and counts
as that.

Down, by one, when one fewer would have `DOWN_BUSY` of what makes more be wanted, and at most `DOWN_QUEUED`.
Between the two nothing changes: under the same load no number of replicas is left and come back to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cache.errors import ConfigError

DOWN_BUSY = 0.75
DOWN_QUEUED = 0.5
MOST_GROWTH = 2  # times what runs
_ROUNDING = 1e-9  # of sums: 3.0000000001 replicas' work is that of 3


@dataclass(frozen=True, slots=True)
class Targets:
    """What is aimed at."""

    target_queued_s: float = 1.0  # seconds of work that may wait for each replica: a newcomer's wait, about
    target_busy: float = 0.8  # of what a replica can do: beyond that, waits grow faster than load

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        for name, least, most in (("target_queued_s", 0.01, 3600.0), ("target_busy", 0.1, 0.95)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise ConfigError(name, value, f"must be between {least} and {most}")


@dataclass(frozen=True, slots=True)
class Fleet:
    """The replicas and their work, in the mean of the last seconds."""

    num_running: int
    num_target: int  # what was decided last
    num_silent: int  # of those that run, who have not told anything yet
    queued_s: float  # seconds of one replica's time that wait, of all of them and at Routers
    busy: float  # replicas' worth of work: the sum of how busy each is
    refused: float  # replicas' worth of work that Routers refused lately
    least: int
    most: int


def wanted_replicas(fleet: Fleet, targets: Targets) -> int:
    """Never fewer for more work, and in [least, most]."""
    needed = max((fleet.busy + fleet.refused) / targets.target_busy, fleet.queued_s / targets.target_queued_s)
    current = min(max(fleet.num_target, fleet.least), fleet.most)
    if needed > current + _ROUNDING:
        ceiling = max(current, MOST_GROWTH * fleet.num_running)
        return min(math.ceil(needed - _ROUNDING), ceiling, fleet.most)
    # Who has not told anything may be the busiest, and who does not run yet was wanted a moment ago.
    is_known = not fleet.num_silent and fleet.num_running >= fleet.num_target
    if is_known and current > fleet.least and _would_do(current - 1, fleet, targets):
        return current - 1
    return current


def _would_do(number: int, fleet: Fleet, targets: Targets) -> bool:
    return (
        fleet.busy + fleet.refused <= DOWN_BUSY * targets.target_busy * number
        and fleet.queued_s <= DOWN_QUEUED * targets.target_queued_s * number
    )
