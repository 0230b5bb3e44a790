"""How urgent a request is beside others of its tenant, in seconds that it may be overtaken by.

A request of priority p is served as one of priority 0 that came `lag_s(p)` later. So there is no class that
another can starve: whoever waits is overtaken by those that come in the next (difference * LEVEL_S) seconds,
and by nobody after that. Lower goes first, as in vLLM's field of this name.
Numbers alone; Routers and replicas use the same ones.
"""

from __future__ import annotations

MIN_PRIORITY, MAX_PRIORITY = -10, 10  # least goes first
LEVEL_S = 5.0  # a level outweighs the waits of a busy server, and two those of an overloaded one


def lag_s(priority: int) -> float:
    """Seconds that it stands back; below 0 for who goes before those that came earlier."""
    return LEVEL_S * priority
