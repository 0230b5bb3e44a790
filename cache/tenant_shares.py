"""Whose turn it is where several tenants want the same: whoever has had least of it, for its share.

Charged in uncached tokens, by engines and by Routers alike: those computed of a tenant's prompts, and those
generated for it; a tenant of twice the share is charged half of them. What is found in the cache is free,
because it costs nobody anything. A tenant that wants to prefill again after a while begins at the least of
those that have wanted it all along, less a credit: what else it left unused is gone, and what it had ahead of
the others it still has (start-time fair queueing: Goyal, Vin, Cheng, SIGCOMM 1996; with token counts for
LLMs: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
Knows names and counts; knows neither requests nor steps. One owner, whose thread it stays on.
"""

from __future__ import annotations

from collections.abc import Collection

REMEMBERED = 256  # tenants that want nothing: beyond that, whose last turn is longest ago are forgotten


class TenantShares:
    """Tokens per tenant, for its share, of those that have been served lately."""

    def __init__(self, credit: float) -> None:
        """credit: tokens that a tenant may have kept of what it did not use: whoever asks now and then is
        served at once, and not turn by turn with whoever asks all the time."""
        self._credit = credit
        self._charged: dict[str, float] = {}  # tokens over shares
        self._last: dict[str, int] = {}  # number of its last charge
        self._served_at: dict[str, float] = {}  # tokens that all had had by then; in that order
        self._served = 0.0
        self._num_charges = 0
        self._wanting: frozenset[str] = frozenset()
        self._least = 0.0  # of those that wanted to prefill when somebody last did
        self._most = 0.0  # that anybody was charged

    def __len__(self) -> int:
        """Tenants that are remembered: who wants something, or has had more than a newcomer begins with."""
        return len(self._charged)

    def __contains__(self, tenant: object) -> bool:
        """Whether it is one of those."""
        return tenant in self._charged

    def num_recent(self) -> int:
        """Tenants that want something, or have had something of the last credit's worth of tokens."""
        recent = set(self._wanting)
        for tenant in reversed(self._served_at):
            if self._served_at[tenant] < self._served - self._credit:
                break
            recent.add(tenant)
        return len(recent)

    def contend(self, tenants: Collection[str]) -> None:
        """These want to prefill now. O(tenants); while they are the same ones, nothing changes.

        While nobody does, nobody is kept waiting and nobody saves anything up. But what the others have had
        is not forgotten: before an engine stands a Router that fills its queue as soon as it is empty, and
        who has taken nine tenths of it would else start level with who has not, again and again.
        """
        wanting = frozenset(tenants)
        if wanting and not self._wanting:
            self._least = max(self._least, self._most)
        stayed = [self._charged[tenant] for tenant in wanting & self._wanting]
        if stayed:
            self._least = max(self._least, min(stayed))
        if wanting == self._wanting:
            return
        floor = self._floor
        for tenant in wanting - self._wanting:
            self._charged[tenant] = max(self._charged.get(tenant, floor), floor)
            self._last.setdefault(tenant, 0)
        self._wanting = wanting
        self._forget(floor)

    def charge(self, tenant: str, num_tokens: int, share: float = 1.0) -> None:
        """Tokens that are about to be computed for it. share: above 0. O(1)."""
        self._num_charges += 1
        charged = self._charged[tenant] = self._charged.get(tenant, self._floor) + num_tokens / share
        self._most = max(self._most, charged)
        self._last[tenant] = self._num_charges
        self._served += num_tokens / share
        self._served_at.pop(tenant, None)
        self._served_at[tenant] = self._served

    def turn(self, tenant: str) -> tuple[float, int]:
        """Least goes first; of equals, whose last turn is longest ago. The tenant wants to prefill."""
        return self._charged[tenant], self._last[tenant]

    def tag(self, tenant: str) -> float:
        """Tokens that it has had, for its share; a newcomer's are what it would be given."""
        return self._charged.get(tenant, self._floor)

    def ahead(self, tenant: str) -> float:
        """Of those, how many beyond what a newcomer would be given; 0 or more."""
        return max(0.0, self.tag(tenant) - self._floor)

    def _forget(self, floor: float) -> None:
        """Who stands no better than a newcomer, and of too many those who were here longest ago."""
        gone = [name for name, had in self._charged.items() if had <= floor and name not in self._wanting]
        if len(self._charged) - len(gone) - len(self._wanting) > REMEMBERED:
            gone = [name for name in self._served_at if name not in self._wanting][:-REMEMBERED]
        for tenant in gone:
            del self._charged[tenant]
            self._last.pop(tenant, None)
            self._served_at.pop(tenant, None)

    @property
    def _floor(self) -> float:
        """Where a newcomer begins."""
        return max(0.0, self._least - self._credit)
