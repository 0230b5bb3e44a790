"""Blocks in nobody's hands yet that requests here will have computed: their twins, though they wait, find them.

Without it a crowd of twins looks like as many whole prompts, and routers take the next one elsewhere.
Knows requests and hashes; decides nothing. Engine thread only.
"""

from __future__ import annotations

from cache.kv_cache_manager import KVCacheManager
from cache.types import BlockHash
from replica.scheduling.request import Request


class Promises:
    """Who will compute what, by whoever came first."""

    def __init__(self, cache: KVCacheManager, *, block_size: int) -> None:
        self._cache = cache
        self._block_size = block_size
        self._promised: dict[BlockHash, Request] = {}

    def __len__(self) -> int:
        """Blocks that are promised."""
        return len(self._promised)

    def expect(self, request: Request) -> int:
        """Tokens it will find in the cache, those there now and those promised; and it promises the rest.

        Of hashes that nobody has sent, only those already worked out count. O(blocks).
        """
        if not request.blocks.looks_up:
            return 0
        hit = self._cache.match(request.blocks).num_tokens
        hashes = request.blocks.block_hashes
        index, last = hit // self._block_size, (len(request.token_ids) - 1) // self._block_size
        while index < min(last, len(hashes)) and hashes[index] in self._promised:
            index += 1
        for block_hash in hashes[index:]:
            self._promised.setdefault(block_hash, request)
        return index * self._block_size

    def forget(self, request: Request) -> None:
        """It is gone: what it has not computed, it will not."""
        for block_hash in request.blocks.block_hashes:
            if self._promised.get(block_hash) is request:
                del self._promised[block_hash]
