"""Whose turn it is where several tenants want the same: whoever has had least of it, for its share.

Charged in uncached tokens, by engines and by Routers alike: those computed of a tenant's prompts, and those
generated for it; a tenant of twice the share is charged half of them. What is found in the cache is free,
because it costs nobody anything. A tenant that wants to prefill
again after a while begins at the least of those that have wanted it all along, less a credit: what else it
left unused is gone, and what it had ahead of the others it still has (start-time fair queueing: Goyal, Vin,
Cheng, SIGCOMM 1996; with token counts for LLMs: Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024).
Knows names and counts; knows neither requests nor steps. One owner, whose thread it stays on.
"""

from __future__ import annotations

from collections.abc import Collection


class TenantShares:
    """Tokens per tenant, for its share, of those that have been served since nobody last wanted any."""

    def __init__(self, credit: float) -> None:
        """credit: tokens that a tenant may have kept of what it did not use: whoever asks now and then is
        served at once, and not turn by turn with whoever asks all the time."""
        self._credit = credit
        self._charged: dict[str, float] = {}  # tokens over shares
        self._last: dict[str, int] = {}  # number of its last charge
        self._num_charges = 0
        self._wanting: frozenset[str] = frozenset()
        self._least = 0.0  # of those that wanted to prefill when somebody last did

    def __len__(self) -> int:
        """Tenants that are remembered."""
        return len(self._charged)

    def contend(self, tenants: Collection[str]) -> None:
        """These want to prefill now. O(tenants); while they are the same ones, nothing changes."""
        wanting = frozenset(tenants)
        if not wanting:  # nobody has been kept waiting: nobody owes anybody anything
            self._charged.clear()
            self._last.clear()
            self._wanting, self._least = wanting, 0.0
            return
        stayed = [self._charged[tenant] for tenant in wanting & self._wanting]
        if stayed:
            self._least = max(self._least, min(stayed))
        if wanting == self._wanting:
            return
        for tenant in wanting - self._wanting:
            self._charged[tenant] = max(self._charged.get(tenant, 0), self._least - self._credit)
            self._last.setdefault(tenant, 0)
        self._wanting = wanting

    def charge(self, tenant: str, num_tokens: int, share: float = 1.0) -> None:
        """Tokens that are about to be computed for it. share: above 0. O(1)."""
        self._num_charges += 1
        self._charged[tenant] = self._charged.get(tenant, self._least) + num_tokens / share
        self._last[tenant] = self._num_charges

    def turn(self, tenant: str) -> tuple[float, int]:
        """Least goes first; of equals, whose last turn is longest ago. The tenant wants to prefill."""
        return self._charged[tenant], self._last[tenant]
