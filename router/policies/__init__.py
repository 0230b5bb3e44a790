"""Routing policies by name: what `policy:` in deploy.yaml may say."""

from __future__ import annotations

import random

from cache.errors import ConfigError
from router.policies.base import Policy, Scored
from router.policies.expected_time import ExpectedTime
from router.policies.round_robin import RoundRobin

NAMES = (ExpectedTime.name, RoundRobin.name)

__all__ = ["NAMES", "Policy", "Scored", "make_policy"]


def make_policy(name: str, *, near_tie: float, rng: random.Random) -> Policy:
    """The policy of that name. Raises ConfigError naming the known ones."""
    if name == ExpectedTime.name:
        return ExpectedTime(near_tie=near_tie, rng=rng)
    if name == RoundRobin.name:
        return RoundRobin()
    raise ConfigError("policy", name, "must be one of " + ", ".join(NAMES))
