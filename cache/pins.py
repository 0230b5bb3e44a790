"""Prefixes held whether anybody runs on them or not: references on blocks, under a name, within a bound.

    promise ──> hold ──> release         a prefix is promised room while it is computed, then held
       └──────────────────┘              release ends either

A pinned block is in use: it cannot be evicted. Two pins of prompts that begin alike share blocks, which count
once. `KVCacheManager` says which blocks a prefix has; the engine says for how long it is held.
Knows blocks and names; knows neither tokens nor time. Not thread-safe: engine thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from cache.block_pool import BlockPool, KVCacheBlock
from cache.errors import ConfigError, PinsFull
from cache.types import PinId


class Pins:
    """Every pin of one pool. `held + promised <= limit`, counted in distinct blocks, always."""

    def __init__(self, pool: BlockPool, limit: int) -> None:
        """limit: blocks that all pins together may hold. Raises ConfigError for more than the pool has."""
        if not 0 <= limit <= pool.num_blocks:
            raise ConfigError("pin limit", limit, f"between 0 and the pool's {pool.num_blocks} blocks")
        self.limit = limit
        self._pool = pool
        self._held: dict[PinId, tuple[KVCacheBlock, ...]] = {}  # parents before children
        self._promised: dict[PinId, int] = {}
        self._num_promised = 0
        self._pins_of: Counter[KVCacheBlock] = Counter()  # how many pins hold a block; never 0

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that are held."""
        return len(self._pins_of)

    @property
    def left(self) -> int:
        """Blocks that further pins may take."""
        return self.limit - self.num_blocks - self._num_promised

    def __len__(self) -> int:
        """Pins, those that are only promised included."""
        return len(self._held) + len(self._promised)

    def __contains__(self, pin_id: PinId) -> bool:
        return pin_id in self._held or pin_id in self._promised

    def blocks(self, pin_id: PinId) -> tuple[KVCacheBlock, ...]:
        """What it holds, parents before children; () while it is only promised, or unknown."""
        return self._held.get(pin_id, ())

    def num_new(self, blocks: Iterable[KVCacheBlock]) -> int:
        """Of these, blocks that no pin holds."""
        return sum(block not in self._pins_of for block in blocks)

    def promise(self, pin_id: PinId, num_new: int) -> None:
        """Keep room for so many blocks that no pin holds yet.

        Raises PinsFull, and changes nothing, where there is none.
        """
        assert pin_id not in self, f"{pin_id} is there already"
        if num_new > self.left:
            raise PinsFull(needed=num_new, left=max(0, self.left))
        self._promised[pin_id] = num_new
        self._num_promised += num_new

    def hold(self, pin_id: PinId, blocks: Sequence[KVCacheBlock]) -> None:
        """Take a reference on each of these, which are one prefix; what it was promised is for that.

        Blocks that it was to share may have been unpinned since the promise: raises PinsFull if it needs
        more than there is now, and changes nothing.
        """
        assert pin_id not in self._held, f"{pin_id} is held already"
        num_new, promised = self.num_new(blocks), self._promised.get(pin_id, 0)
        if num_new > self.left + promised:
            raise PinsFull(needed=num_new, left=max(0, self.left + promised))
        self._withdraw(pin_id)
        for block in blocks:
            self._pool.touch(block)
        self._pins_of.update(blocks)
        self._held[pin_id] = tuple(blocks)

    def release(self, pin_id: PinId) -> bool:
        """End a promise or give back what is held, last block first; whether there was such a pin."""
        was_promised = self._withdraw(pin_id)
        blocks = self._held.pop(pin_id, None)
        if blocks is None:
            return was_promised
        for block in blocks:
            self._pins_of[block] -= 1
            if not self._pins_of[block]:
                del self._pins_of[block]
        # As a sequence gives its blocks back: so leaves leave first.
        self._pool.free(reversed(blocks))
        return True

    def _withdraw(self, pin_id: PinId) -> bool:
        promised = self._promised.pop(pin_id, None)
        if promised is None:
            return False
        self._num_promised -= promised
        return True
