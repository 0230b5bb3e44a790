"""Which tenants ask for more than their part of what is served, lately.

    a tenant is within its share   <=>   asked for / its share  <=  all that was placed / the shares of all

Where more keeps coming than is served, somebody has to be refused: those who ask for more than their part,
whoever they stand behind. What a tenant asks for is counted whether it is let in or not, so being refused
makes nobody look modest; what is placed is what the replicas take: their capacity, while there is too much.
What was generated for a tenant it has asked for and was given, so that counts as both.
Knows names, tokens and times; knows neither requests nor queues. Owner: the router's event loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY_S = 20.0  # in which all but a third of what was asked for is forgotten
FORGOTTEN = 1e-3  # of what all have asked for: who asked for less lately is no tenant here


@dataclass(slots=True)
class _Asked:
    share: float
    tokens: float = 0.0  # as of `TenantDemand._at`


class TenantDemand:
    """Tokens that were asked for and placed, each worth less by and by."""

    def __init__(self) -> None:
        self._asked: dict[str, _Asked] = {}
        self._total = 0.0
        self._placed = 0.0
        self._at = -math.inf  # the moment that all of them are of

    def came(self, tenant: str, num_tokens: int, share: float, now: float) -> None:
        """Somebody asked for so much, at the caller's clock. O(tenants)."""
        self._age(now)
        asked = self._asked.setdefault(tenant, _Asked(share))
        asked.share = share
        asked.tokens += num_tokens
        self._total += num_tokens

    def placed(self, num_tokens: int, now: float) -> None:
        """So much was sent to a replica, or generated there."""
        self._age(now)
        self._placed += num_tokens

    def is_within_share(self, tenant: str, now: float) -> bool:
        """Whether it asks for no more than its part; of a tenant alone that is not asked. O(tenants)."""
        self._age(now)
        asked = self._asked.get(tenant)
        if asked is None or len(self._asked) < 2:
            return False
        shares = sum([each.share for each in self._asked.values()])
        return asked.tokens / asked.share <= self._placed / shares

    def _age(self, now: float) -> None:
        """By a hundredth of the memory at a time, so that most calls change nothing."""
        if now - self._at < MEMORY_S / 100:
            return
        kept = math.exp((self._at - now) / MEMORY_S)
        self._at = now
        self._placed *= kept
        self._total *= kept
        for asked in self._asked.values():
            asked.tokens *= kept
        gone = [name for name, asked in self._asked.items() if asked.tokens < FORGOTTEN * self._total]
        for name in gone:
            self._total -= self._asked.pop(name).tokens
