"""How full the cache is, for metrics and tests. Counts alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot for metrics and tests. free + used == total, always."""

    total: int
    free: int  # in the free queue, cached content included
    used: int  # referenced by at least one sequence or pin
    cached: int  # blocks with a registered hash, duplicates included
    pinned: int  # of those in use, referenced by at least one pin
    host_cached: int = 0  # blocks in host memory that a prompt may find
    host_swapped: int = 0  # blocks there of sequences that were swapped out
    host_used: int = 0  # slots taken, those of the step's own moves included
    host_total: int = 0
