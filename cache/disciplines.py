"""The three ways of keeping computed prefixes, by name.

    append_only     block tables only grow; what is computed twice is kept twice     KVCacheManager
    merge_on_fill   one block per content: a full block gives way to its twin        MergingKVCacheManager
    radix_tree      a tree of token runs, shared to the token; blocks of one token   RadixCache

The first two hold blocks of many tokens, and an engine runs either. The third is what they are measured
against: docs/design/020-cache-disciplines.md says why no engine offers it.
"""

from __future__ import annotations

from enum import StrEnum

from cache.block_hash import BlockHasher
from cache.errors import ConfigError
from cache.host_tier import HostTier
from cache.kv_cache_manager import BlockEventSink, KVCacheManager
from cache.merging import MergingKVCacheManager


class CacheDiscipline(StrEnum):
    """How a cache deals with content that it has already."""

    APPEND_ONLY = "append_only"
    MERGE_ON_FILL = "merge_on_fill"
    RADIX_TREE = "radix_tree"


_PAGED = {
    CacheDiscipline.APPEND_ONLY: KVCacheManager,
    CacheDiscipline.MERGE_ON_FILL: MergingKVCacheManager,
}
PAGED = tuple(_PAGED)  # what an engine may run
# It finds as much as append-only, holds nothing twice, and costs no more (docs/design/020).
DEFAULT = CacheDiscipline.MERGE_ON_FILL


def paged_cache(
    discipline: CacheDiscipline,
    num_blocks: int,
    hasher: BlockHasher,
    *,
    block_size: int,
    prefix_caching: bool = True,
    sink: BlockEventSink | None = None,
    max_pinned: int = 0,
    host: HostTier | None = None,
) -> KVCacheManager:
    """The manager of that discipline; the other arguments are its own.

    Raises ConfigError for one that has no pages, and whatever the manager refuses.
    """
    if discipline not in _PAGED:
        raise ConfigError("cache_discipline", discipline.value, "must be one of " + ", ".join(PAGED))
    return _PAGED[discipline](
        num_blocks,
        hasher,
        block_size=block_size,
        prefix_caching=prefix_caching,
        sink=sink,
        max_pinned=max_pinned,
        host=host,
    )
