"""Prefixes that the manager holds for whoever pinned them."""

from __future__ import annotations

import pytest

from cache.block_hash import BlockHasher
from cache.errors import BlocksInUse, ConfigError, PinsFull
from cache.kv_cache_manager import KVCacheManager, SequenceBlocks
from cache.types import PinId
from tests.fakes.cache import a_fingerprint, check_pool
from tests.fakes.kv_cache import letters, start


class TestPins:
    """Blocks A to D of "AAAABBBBCCCCDDDD…", four tokens each, in a pool of 10 of which 4 may be pinned."""

    def manager(self, **settings: object) -> KVCacheManager:
        hasher = BlockHasher(a_fingerprint())
        return KVCacheManager(10, hasher, block_size=4, max_pinned=4, **settings)  # type: ignore[arg-type]

    def cached(self, manager: KVCacheManager, text: str) -> SequenceBlocks:
        """Computed, committed and given back."""
        sequence, _ = start(manager, text)
        manager.commit_step()
        manager.release(sequence)
        return sequence

    def test_what_is_pinned_outlives_everything_else(self) -> None:
        manager = self.manager()
        sequence = self.cached(manager, "AAAABBBBCCCCx")
        assert manager.pin(PinId("p"), sequence, 2)
        assert manager.stats().pinned == manager.stats().used == 2
        self.cached(manager, "y" * 32)  # eight blocks: all that is left
        hit = manager.match(manager.begin(letters("AAAABBBBCCCCx")))
        assert hit.num_tokens == 8
        assert manager.unpin(PinId("p"))
        assert not manager.unpin(PinId("p"))
        assert manager.num_free == 10
        check_pool(manager.pool, [])

    def test_what_is_not_cached_is_not_pinned(self) -> None:
        manager = self.manager()
        sequence = self.cached(manager, "AAAABBBBx")
        longer = manager.begin(letters("AAAABBBBCCCCx"))
        assert not manager.pin(PinId("p"), longer, 3)
        assert manager.pin(PinId("p"), sequence, 2)

    def test_a_shared_block_counts_once(self) -> None:
        manager = self.manager()
        sequence = self.cached(manager, "AAAABBBBCCCCDDDDx")
        assert manager.pin(PinId("p"), sequence, 3)
        assert manager.pin(PinId("q"), sequence, 4)
        assert manager.stats().pinned == 4
        manager.unpin(PinId("q"))
        assert manager.stats().pinned == 3
        assert manager.stats().free == 7

    def test_pins_keep_their_bound_and_say_both_numbers(self) -> None:
        manager = self.manager()
        first, second = self.cached(manager, "AAAABBBBCCCCx"), self.cached(manager, "DDDDEEEEx")
        assert manager.pin(PinId("p"), first, 3)
        with pytest.raises(PinsFull) as caught:
            manager.pin(PinId("q"), second, 2)
        assert (caught.value.needed, caught.value.left) == (2, 1)
        assert manager.pin(PinId("q"), second, 1)

    def test_a_promise_is_room_that_nobody_else_gets(self) -> None:
        manager = self.manager()
        cached, wanted = self.cached(manager, "AAAABBBBx"), manager.begin(letters("DDDDEEEEFFFFx"))
        manager.promise_pin(PinId("p"), wanted, 3)
        with pytest.raises(PinsFull) as caught:
            manager.pin(PinId("q"), cached, 2)
        assert (caught.value.needed, caught.value.left) == (2, 1)
        manager.unpin(PinId("p"))
        assert manager.pin(PinId("q"), cached, 2)

    def test_nothing_is_pinned_without_prefix_caching(self) -> None:
        manager = self.manager(prefix_caching=False)
        sequence = self.cached(manager, "AAAABBBBx")
        with pytest.raises(PinsFull) as caught:
            manager.promise_pin(PinId("p"), sequence, 2)
        assert caught.value.left == 0
        assert not manager.pin(PinId("p"), sequence, 2)

    def test_a_cache_with_pins_is_not_cleared(self) -> None:
        manager = self.manager()
        assert manager.pin(PinId("p"), self.cached(manager, "AAAAx"), 1)
        with pytest.raises(BlocksInUse):
            manager.clear()

    def test_a_pool_smaller_than_its_pins(self) -> None:
        with pytest.raises(ConfigError):
            KVCacheManager(3, BlockHasher(a_fingerprint()), block_size=4, max_pinned=4)
