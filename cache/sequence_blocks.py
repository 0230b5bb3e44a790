"""A sequence's claim on the cache, and what a lookup finds for it: values that `kv_cache_manager.py` writes.

Knows token ids, block ids and hashes; knows neither the pool nor host memory.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from cache.block_hash import ExtraKeys
from cache.types import BlockHash


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """One sequence's claim on the cache. Written by `KVCacheManager` alone; others read.

    [0, hit) shared from the cache   [hit, full) ours, hashed   [full, end) ours, no hash yet
    """

    token_ids: array[int]  # prompt + output; shared with the request, which appends to it
    root: BlockHash  # empty with prefix caching off
    extra_keys: ExtraKeys = field(default_factory=dict)
    block_table: list[int] = field(
        default_factory=list
    )  # block ids in token order; only a commit changes one
    block_hashes: list[BlockHash] = field(default_factory=list)  # of full blocks hashed so far
    num_offered: int = 0  # leading blocks of the table registered so far, or refused
    # A fork's: the block whose tokens the coming step copies into the table's last one; held until it has.
    copy_source: int | None = None
    looks_up: bool = True  # False: everything of it is to be computed, whatever the cache holds
    # Ids of leading blocks that lookups found, which hold while the pool's count of removals is `found_at`:
    # who is looked up again, as when it is let in, only asks for what may have come since.
    found: list[int] = field(default_factory=list)
    found_at: int = 0


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Leading blocks of a sequence that the cache holds, verified token by token."""

    block_ids: tuple[int, ...]
    num_tokens: int  # of those blocks, and of `slots`; at most len(token_ids) - 1
    num_idle: int  # of the blocks, those waiting in the free queue: they stop being free when taken
    removals: int = 0  # the pool's count at lookup: while it stands still, the hit holds unchecked
    # Host memory's slots of what follows those blocks, to be copied back; the last one may be partly filled,
    # if the sequence had been swapped out.
    slots: tuple[int, ...] = ()
    num_declined: int = 0  # blocks that host memory holds behind it, cheaper to compute


@dataclass(frozen=True, slots=True)
class SwappedBlocks:
    """What host memory holds for one sequence alone."""

    slots: tuple[int, ...]  # of its first blocks
    num_tokens: int
