"""Blocks in nobody's hands yet that requests here will have computed: twins that wait will find them.

Without it a crowd of twins looks like as many whole prompts, and routers take the next one elsewhere.
Knows requests and hashes; decides nothing. Engine thread only.
"""

from __future__ import annotations

from typing import NamedTuple

from cache.prefix_cache import PrefixCache
from cache.types import BlockHash
from replica.scheduling.request import Request


class Expectation(NamedTuple):
    """What a request will find."""

    num_tokens: int
    promiser: Request | None  # who has yet to compute the last of them; None: all are there


class Promises:
    """Who will compute what, by whoever came first."""

    def __init__(self, cache: PrefixCache, *, block_size: int) -> None:
        self._cache = cache
        self._block_size = block_size
        self._promised: dict[BlockHash, Request] = {}

    def __len__(self) -> int:
        """Blocks that are promised."""
        return len(self._promised)

    def expect(self, request: Request) -> Expectation:
        """What it will find in the cache, there now or promised; and it promises the rest itself.

        Of hashes that nobody has sent, only those already worked out count. O(blocks).
        """
        if not request.blocks.looks_up:
            return Expectation(0, None)
        hit = self._cache.match(request.blocks).num_tokens
        hashes = request.blocks.block_hashes
        promiser: Request | None = None
        index, last = hit // self._block_size, (len(request.token_ids) - 1) // self._block_size
        while index < min(last, len(hashes)) and hashes[index] in self._promised:
            promiser = self._promised[hashes[index]]
            index += 1
        for block_hash in hashes[index:]:
            self._promised.setdefault(block_hash, request)
        return Expectation(index * self._block_size, promiser)

    def forget(self, request: Request) -> None:
        """It is gone: what it has not computed, it will not."""
        for block_hash in request.blocks.block_hashes:
            if self._promised.get(block_hash) is request:
                del self._promised[block_hash]
