"""How requests are held: the knobs of late binding. Knows the Router's configuration alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.config import RouterConfig
from router.placement.admission import max_wait_of

AGED = 0.5  # of the longest wait: who has waited so long is past the age floor
STEPS = 4.0  # without a prompt, that a short backlog may take: with less, steps are long for few prompts


@dataclass(frozen=True, slots=True)
class HoldOptions:
    """The knobs, checked where they are configured: `RouterConfig` tells what they do, and why so much."""

    max_backlog_s: float
    window: int  # requests
    aging: float
    age_floor_s: float
    max_held_per_replica: int
    max_wait_s: float = math.inf  # inf: whoever comes may wait
    overload_wait_s: float | None = None  # while more keeps coming than is served; None: found out

    @property
    def max_backlog_steps(self) -> float:
        """What so many steps take without a prompt is short, too; 0 where a replica is to be idle."""
        return STEPS if self.max_backlog_s else 0.0

    @classmethod
    def of(cls, config: RouterConfig) -> HoldOptions:
        return cls(
            max_backlog_s=config.hold_backlog_s,
            window=config.hold_window,
            aging=config.hold_aging,
            # Where it is busy for long there is always short work: else long work would wait in vain.
            age_floor_s=min(config.hold_age_floor_s, AGED * max_wait_of(config)),
            max_held_per_replica=config.max_held_per_replica,
            max_wait_s=max_wait_of(config),
            overload_wait_s=config.overload_wait_s,
        )
