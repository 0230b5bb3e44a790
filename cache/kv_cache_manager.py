"""Which blocks a sequence uses: lookup, admission, growth, release.

The scheduler's only door to the cache. Knows token ids, block ids and hashes; knows no tensors.
Not thread-safe: engine thread only.

One engine step:
    match, admit, grow, release (= preempt) of the sequences to schedule
    the forward
    commit_step() or abort_step()
    release of the sequences that are finished or failed

Full blocks are registered when they are scheduled, before they are computed, so that a twin in the
same step shares them. From then to `commit_step` their content is a promise of the sequence that
registered them; `release` and `abort_step` take back promises that will not be kept.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

from cache.block_hash import BlockHasher, ExtraKeys
from cache.block_pool import BlockEventSink, BlockPool, KVCacheBlock
from cache.cache_stats import CacheStats
from cache.errors import BlocksAwaited, BlocksInUse, ConfigError, NoFreeBlocks, StaleHit
from cache.host_tier import BlockMoves, HostTier, HostTotals
from cache.pins import Pins
from cache.sequence_blocks import PrefixHit, SequenceBlocks, SwappedBlocks
from cache.sequence_names import SequenceNames
from cache.types import BlockHash, PinId

__all__ = ["BlockEventSink", "CacheStats", "KVCacheManager", "PrefixHit", "SequenceBlocks"]

_NO_HASH = BlockHash(b"")


class KVCacheManager:
    """Owns the pool and every `SequenceBlocks` that it began."""

    def __init__(
        self,
        num_blocks: int,
        hasher: BlockHasher,
        *,
        block_size: int,
        prefix_caching: bool = True,
        sink: BlockEventSink | None = None,
        max_pinned: int = 0,
        host: HostTier | None = None,
    ) -> None:
        """max_pinned: blocks that pins may hold. host: keeps what is evicted; its sink is told of both tiers,
        and `sink` of none then.

        Raises ConfigError for a pool without blocks, one that has fewer than that, or a block size that the
        hasher does not share.
        """
        if block_size != hasher.block_size:
            raise ConfigError("block_size", block_size, f"the hasher's block size, {hasher.block_size}")
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        assert host is None or sink is None, "host memory tells its own sink"
        self.host = host
        # Registered since the last commit, in that order, and who computes it. Each is in use.
        self._uncommitted: dict[KVCacheBlock, SequenceBlocks] = {}
        self.pool = BlockPool(num_blocks, sink if host is None else host, host, self._uncommitted)
        self.pins = Pins(self.pool, max_pinned if prefix_caching else 0)
        self._hasher = hasher
        self._names = SequenceNames(hasher)
        self._copying: list[SequenceBlocks] = []  # forks since the last commit
        self._swapped: dict[SequenceBlocks, SwappedBlocks] = {}
        self._resumed: list[SequenceBlocks] = []  # of those, admitted since the last commit

    def begin(
        self,
        token_ids: array[int],
        *,
        salt: str = "",
        adapter: str = "",
        adapter_digest: str = "",
        extra_keys: ExtraKeys | None = None,
        block_hashes: Sequence[BlockHash] = (),
        looks_up: bool = True,
    ) -> SequenceBlocks:
        """A sequence that holds no blocks yet.

        `block_hashes` sent by a router save hashing; they are taken only if the first one equals
        what this engine computes itself (another root or salt would not), and the last one follows
        from the one before; else all are recomputed.
        """
        if not self.prefix_caching:
            return SequenceBlocks(token_ids, _NO_HASH, extra_keys or {}, looks_up=False)
        root = self._hasher.root(adapter, adapter_digest, salt)
        sequence = SequenceBlocks(token_ids, root, extra_keys or {}, looks_up=looks_up)
        if block_hashes and self._names.are_of(sequence, block_hashes):
            sequence.block_hashes.extend(block_hashes)
        return sequence

    def match(self, sequence: SequenceBlocks) -> PrefixHit:
        """Longest cached prefix of the sequence, capped so that at least one token is computed.

        Where the pool's blocks end it goes on in host memory, if copying what is there is worth it.
        Changes nothing but the sequence's lazily computed hashes. O(blocks matched).
        Of one that does not look up, as none does with `prefix_caching=False`: an empty hit, but for what was
        swapped out of it.
        """
        swapped = self._swapped.get(sequence) if self._swapped else None
        if not sequence.looks_up and swapped is None:
            return PrefixHit((), 0, 0)
        limit = (len(sequence.token_ids) - 1) // self.block_size if sequence.looks_up else 0
        run = self._cached_run(sequence, limit)
        num_tokens, num_declined = len(run) * self.block_size, 0
        slots: tuple[int, ...] = ()
        if swapped is not None and swapped.num_tokens > num_tokens:
            slots, num_tokens = swapped.slots[len(run) :], swapped.num_tokens
        elif self.host is not None and len(run) < limit:
            found = self._names.find(sequence, len(run), limit, self.host.lookup)
            if found and self.host.is_cheaper(num_tokens, len(found)):
                slots = tuple(found)
                num_tokens += len(found) * self.block_size
            else:
                num_declined = len(found)
        num_idle = sum([block.ref_count == 0 for block in run])
        block_ids = tuple([block.block_id for block in run])
        return PrefixHit(block_ids, num_tokens, num_idle, self.pool.removals, slots, num_declined)

    def allow_hits(self, sequence: SequenceBlocks) -> None:
        """From its next `match` on it looks up, if this cache finds anything at all."""
        sequence.looks_up = self.prefix_caching

    def new_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, sequence: SequenceBlocks, hit: PrefixHit, num_tokens: int) -> int:
        """Free blocks that `admit(sequence, hit, num_tokens)` would take, idle hit blocks included.

        With the tokens still to be generated counted in, it is the whole request's need.
        """
        return self.new_blocks(hit.num_tokens + num_tokens) - len(hit.block_ids) + hit.num_idle

    def admit(self, sequence: SequenceBlocks, hit: PrefixHit, num_tokens: int) -> None:
        """Take the hit's blocks, and new ones for what is copied back and for `num_tokens` tokens after it;
        register full ones.

        Raises NoFreeBlocks when they do not fit, StaleHit when a block of the hit has been evicted
        since `match`; changes nothing then.
        """
        assert not sequence.block_table, "admitted twice: release the sequence first"
        assert hit.num_tokens + num_tokens <= len(sequence.token_ids), "no such tokens to compute"
        shared = [self.pool.blocks[block_id] for block_id in hit.block_ids]
        if hit.removals != self.pool.removals and shared != self._cached_run(sequence, len(shared)):
            raise StaleHit(num_blocks=len(shared))
        num_new = self.new_blocks(hit.num_tokens + num_tokens) - len(shared)
        # Counted now: other admissions since `match` may have taken some, or given some back.
        num_idle = sum(block.ref_count == 0 for block in shared)
        if num_new + num_idle > self.pool.num_free:
            raise NoFreeBlocks(needed=num_new + num_idle, free=self.pool.num_free)
        if hit.slots:
            self._hold(sequence, hit)
        if sequence in self._swapped:
            self._resumed.append(sequence)
        for block in shared:  # before allocating, which might evict them
            self.pool.touch(block)
        sequence.block_table.extend(hit.block_ids)
        sequence.block_table.extend(block.block_id for block in self.pool.allocate(num_new))
        if self.host is not None:
            first, end = len(shared), len(shared) + len(hit.slots)
            self.host.load(hit.slots, sequence.block_table[first:end])
            self.host.decline(hit.num_declined)
        sequence.num_offered = len(shared)
        self._register_full(sequence, hit.num_tokens + num_tokens)

    def fork(self, parent: SequenceBlocks, child: SequenceBlocks, num_tokens: int) -> None:
        """Let a child begin with the parent's first `num_tokens` tokens: full blocks by reference, the rest
        in a block of its own, copied from the parent's before the coming step computes (`copy_source`).

            parent  [a][b][c ..]     num_tokens ends in c
            child   [a][b][d ..]     d: c's tokens up to there, and then the child's

        Nobody writes into a block that another reads: what the child computes next lies in d. Needs no prefix
        cache. Between steps. Raises NoFreeBlocks and changes nothing when d does not fit.
        """
        assert not child.block_table, "forked into a sequence that holds blocks"
        assert not self._uncommitted, "what this step computes is not there yet: fork after the commit"
        num_shared, num_copied = divmod(num_tokens, self.block_size)
        [own] = self.pool.allocate(1)
        blocks, table = self.pool.blocks, parent.block_table
        for block_id in table[:num_shared]:
            self.pool.touch(blocks[block_id])
        child.block_table += [*table[:num_shared], own.block_id]
        child.num_offered = min(parent.num_offered, num_shared)
        if len(child.block_hashes) < child.num_offered:
            child.block_hashes[:] = parent.block_hashes[: child.num_offered]
        if num_copied:
            child.copy_source = table[num_shared]
            self.pool.touch(blocks[child.copy_source])
            self._copying.append(child)

    def grow(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Make room for the first `num_tokens` tokens of the sequence in all; register full ones.

        Tokens [0, num_tokens) must be in `token_ids`: they are computed in the coming step.
        Raises NoFreeBlocks and changes nothing when they do not fit.
        """
        assert num_tokens <= len(sequence.token_ids), "no such tokens to compute"
        if self.new_blocks(num_tokens) > len(sequence.block_table):
            self.reserve(sequence, num_tokens)
        self._register_full(sequence, num_tokens)

    def reserve(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Room for `num_tokens` tokens in all, whose last nobody knows yet, or which the coming step does not
        complete: the `grow` that follows takes no more blocks, and registers them.
        Raises NoFreeBlocks and changes nothing.
        """
        num_new = self.new_blocks(num_tokens) - len(sequence.block_table)
        if num_new > 0:
            sequence.block_table.extend(block.block_id for block in self.pool.allocate(num_new))

    def num_own(self, sequence: SequenceBlocks) -> int:
        """Blocks of it that nobody else holds, as far as halving its table finds them: shared ones lead it,
        and where a twin's copies lie between ours, it is an estimate. O(log blocks).
        """
        blocks, table = self.pool.blocks, sequence.block_table
        first_own = bisect_left(table, True, key=lambda block_id: blocks[block_id].ref_count == 1)
        return len(table) - first_own

    @property
    def sharings(self) -> int:
        return self.pool.sharings

    def is_awaited(self, sequence: SequenceBlocks) -> bool:
        """Whether another sequence of this step reads blocks that this one is about to compute."""
        if not self._uncommitted:
            return False
        blocks = (self.pool.blocks[block_id] for block_id in sequence.block_table)
        return any(block.ref_count > 1 and self._uncommitted.get(block) is sequence for block in blocks)

    def release(self, sequence: SequenceBlocks) -> None:
        """Give back every block, last first, so that tails are evicted before their prefixes.

        Content stays cached, except blocks registered in a step that is not committed: they will
        not be computed. Idempotent. The sequence may be matched and admitted again.
        Raises BlocksAwaited, and changes nothing, if `is_awaited`: release after the commit.
        """
        if self.is_awaited(sequence):
            raise BlocksAwaited
        blocks = [self.pool.blocks[block_id] for block_id in reversed(sequence.block_table)]
        if self.host is not None:
            self.host.cancel_loads([block.block_id for block in blocks if block.ref_count == 1])
            self._drop_swapped(sequence)
        if self._uncommitted:
            for block in blocks:
                if self._uncommitted.get(block) is sequence:
                    del self._uncommitted[block]
                    self.pool.unregister(block)
        self._free_source(sequence)  # first: its parent is among the others
        self.pool.free(blocks)
        sequence.block_table.clear()
        sequence.num_offered = 0

    def swap_out(self, sequence: SequenceBlocks, num_tokens: int) -> bool:
        """`release`, but the first `num_tokens` tokens are kept for the sequence in host memory, for its next
        admission; they were computed before the coming step. False, and nothing changed, if there is no room.
        """
        assert not self.is_awaited(sequence), "its tokens are computed: nobody awaits them"
        if self.host is None:
            return False
        block_ids = sequence.block_table[: self.new_blocks(num_tokens)]
        if sequence.copy_source is not None:  # a fork's, yet to be copied into its last block
            block_ids[-1] = sequence.copy_source
        slots = self.host.swap_out(block_ids)
        if slots is None:
            return False
        self.release(sequence)
        self._swapped[sequence] = SwappedBlocks(slots, num_tokens)
        return True

    def take_moves(self) -> BlockMoves:
        """What is to be copied to and from host memory before the coming forward."""
        return self.host.take_moves() if self.host is not None else BlockMoves()

    def forget_host(self, *, for_good: bool = False) -> None:
        """A copy failed: nothing in host memory is to be trusted, and nothing comes there any more if it is
        for good. Abort the step next."""
        assert self.host is not None
        self._swapped.clear()
        self._resumed.clear()
        self.host.forget()
        if for_good:
            self.host.close()

    def promise_pin(self, pin_id: PinId, sequence: SequenceBlocks, num_blocks: int) -> None:
        """Keep room for a pin of the sequence's first blocks, until `pin` or `unpin`.

        Raises PinsFull, and changes nothing, if they do not fit beside what is pinned.
        """
        self.pins.promise(pin_id, num_blocks - self._num_pinned(sequence, num_blocks))

    def pin(self, pin_id: PinId, sequence: SequenceBlocks, num_blocks: int) -> bool:
        """Hold the sequence's first blocks until `unpin`; False, and nothing changed, if one is not cached.

        Between steps. Raises PinsFull, and changes nothing, if they do not fit beside what is pinned.
        """
        assert not self._uncommitted, "what this step computes is not there yet: pin after the commit"
        assert num_blocks * self.block_size <= len(sequence.token_ids), "it has no so many full blocks"
        if not self.prefix_caching:
            return False
        run = self._cached_run(sequence, num_blocks)
        if len(run) < num_blocks:
            return False
        self.pins.hold(pin_id, run)
        return True

    def unpin(self, pin_id: PinId) -> bool:
        """Give back what a pin holds, last block first, or was promised; whether there was one."""
        return self.pins.release(pin_id)

    def commit_step(self) -> None:
        """The step's forward succeeded: what was registered since the last commit is computed, and copied."""
        self._uncommitted.clear()
        for child in self._copying:
            self._free_source(child)
        self._copying.clear()
        if self.host is not None:
            self.host.commit()
            for sequence in self._resumed:
                self._drop_swapped(sequence)
            self._resumed.clear()

    def abort_step(self) -> None:
        """The step's forward failed: un-register every block registered since the last commit.

        Sequences that took such blocks must be released (or restarted) by the caller.
        """
        for block in reversed(self._uncommitted):  # children were registered after their parents
            self.pool.unregister(block)
        self._uncommitted.clear()
        if self.host is not None:
            self.host.abort()
            self._resumed.clear()

    def clear(self) -> None:
        """Forget all cached content. Emits removals, children first.

        Raises BlocksInUse and changes nothing while a sequence or a pin holds blocks.
        """
        if self.pool.num_free < self.pool.num_blocks:
            raise BlocksInUse(used=self.pool.num_blocks - self.pool.num_free)
        if self.host is not None:  # first: what is there hangs on what is in the pool
            self.forget_host()
        for block in self.pool.free_queue:
            if block.block_hash is not None:
                self.pool.unregister(block)

    def _free_source(self, child: SequenceBlocks) -> None:
        if child.copy_source is not None:
            self.pool.free([self.pool.blocks[child.copy_source]])
            child.copy_source = None

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def stats(self) -> CacheStats:
        total, free, host = self.pool.num_blocks, self.pool.num_free, self.host
        return CacheStats(
            total=total,
            free=free,
            used=total - free,
            cached=self.pool.num_cached,
            pinned=self.pins.num_blocks,
            host_cached=host.num_cached if host is not None else 0,
            host_swapped=host.num_swapped if host is not None else 0,
            host_used=host.num_used if host is not None else 0,
            host_total=host.max_blocks if host is not None else 0,
        )

    def host_totals(self) -> HostTotals:
        """All zero without host memory."""
        return self.host.totals() if self.host is not None else HostTotals()

    def _hold(self, sequence: SequenceBlocks, hit: PrefixHit) -> None:
        """Keep what the hit has in host memory from eviction. Raises StaleHit if it is not there any more."""
        assert self.host is not None, "a hit of another cache"
        first, num_blocks = len(hit.block_ids), len(hit.block_ids) + len(hit.slots)
        swapped = self._swapped.get(sequence)
        if swapped is not None and swapped.slots[first:] == hit.slots:
            return
        if not self.host.hold(sequence.block_hashes[first:num_blocks], hit.slots):
            raise StaleHit(num_blocks=num_blocks)

    def _drop_swapped(self, sequence: SequenceBlocks) -> None:
        swapped = self._swapped.pop(sequence, None)
        if swapped is not None:
            assert self.host is not None
            self.host.free(swapped.slots)

    def _num_pinned(self, sequence: SequenceBlocks, num_blocks: int) -> int:
        """Of the sequence's first blocks, those that pins hold. They lead it: a pin holds whole prefixes."""
        if not self.prefix_caching:
            return 0
        run = self._cached_run(sequence, num_blocks)
        return len(run) - self.pins.num_new(run)

    def _cached_run(self, sequence: SequenceBlocks, limit: int) -> list[KVCacheBlock]:
        """Blocks that hold the sequence's leading ones, up to `limit`, without gaps."""
        if sequence.found_at != self.pool.removals:
            sequence.found, sequence.found_at = [], self.pool.removals
        known = [self.pool.blocks[block_id] for block_id in sequence.found[:limit]]
        new = self._names.find(sequence, len(known), limit, self.pool.lookup)
        sequence.found += [block.block_id for block in new]
        return known + new

    def _register_full(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Register the blocks that the first `num_tokens` tokens fill and that are not yet."""
        num_full = num_tokens // self.block_size
        first = sequence.num_offered
        if first >= num_full or not self.prefix_caching:
            return
        blocks, table = self.pool.blocks, sequence.block_table
        # Only behind a registered block: behind one that a colliding hash or an aborted step kept out,
        # a hash would name content that lookups could reach through another prefix.
        if first and blocks[table[first - 1]].block_hash != sequence.block_hashes[first - 1]:
            return
        self._names.hash_up_to(sequence, num_full)
        for index, content in enumerate(self._names.contents(sequence, first, num_full), first):
            block = blocks[table[index]]
            sequence.num_offered = index + 1
            if not self.pool.register(block, sequence.block_hashes[index], content):
                return  # and none after it, ever: see above
            self._uncommitted[block] = sequence
