"""Host memory behind the block pool: what the pool evicts stays there until it is the least recently used.

    pool --evicted--> host --found by a prompt--> pool          a block is moved, not copied
      a running sequence's blocks --swapped out--> host --resumed--> pool      its own, found by nobody else

A block is in the pool or here. Both is for the step only that moves or recomputes it: its entry then waits in
`_moving` and cannot be evicted, until the commit drops it or an abort makes it the latest again.

Why a block's parent is always in one of the two ("leaves leave first" over both tiers). The invariant is:
the parent of each entry is in the pool, or here and behind it in the order of eviction.
  - A block comes here when the pool evicts it, at the end of the order. Its parent is in the pool then (the
    pool's own law), and what hangs on it came earlier, so stands before it.
  - Eviction takes the first entry: nothing that is still here hangs on it.
  - An entry leaves for the pool only behind its parent, which is in the pool, since a prompt's match goes on
    here where the pool's ends. What hangs on it has its parent in the pool then.
  - What an abort brings back goes to the end, children first. So does what the pool evicts in the middle of a
    step that was going to compute it again.
  - Nothing comes here when all slots are taken by what is moving or swapped out. Then no other entry is left,
    and what is moving has its parent in use in the pool.

Bytes are the runner's: this file knows slots, and `take_moves` says what is to be copied. What is copied out
stays in its block until the next forward, so copies are made right before it, those out first.
Knows hashes, block ids and slots; knows neither sequences nor tensors. Not thread-safe: engine thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cache.block_pool import BlockContent, BlockEventSink
from cache.errors import ConfigError
from cache.types import BlockHash


class TierEventSink(BlockEventSink, Protocol):
    """Told where a hash is: `stored` and `removed` are the pool's. Must not block."""

    def demoted(self, block_hash: BlockHash) -> None:
        """From the pool to host memory."""

    def promoted(self, block_hash: BlockHash) -> None:
        """From host memory to the pool."""

    def dropped(self, block_hash: BlockHash) -> None:
        """From host memory to nowhere."""


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Copies to be made before the next forward: all saves, then all loads. No target is named twice."""

    saves: tuple[tuple[int, int], ...] = ()  # (block id, slot)
    loads: tuple[tuple[int, int], ...] = ()  # (slot, block id)

    def __bool__(self) -> bool:
        return bool(self.saves or self.loads)


@dataclass(frozen=True, slots=True)
class HostTotals:
    """For metrics: slots as they are, and blocks since the start."""

    used: int = 0  # slots, whatever for; never more than `total`
    total: int = 0
    swapped: int = 0  # of the used ones, of sequences that were put back
    hits: int = 0  # found by a prompt and copied back
    declined: int = 0  # found, and computed anew because that was cheaper
    saved: int = 0  # copied out, what was swapped included
    loaded: int = 0  # copied back, likewise


class _Entry(NamedTuple):
    slot: int
    content: BlockContent


def _always(_cached_tokens: int, _num_blocks: int) -> bool:
    return True


def _unheard() -> None:
    pass


class HostTier:
    """Owns the slots. A `BlockEventSink` of the pool's, and where the pool puts what it evicts."""

    def __init__(
        self,
        max_blocks: int,
        sink: TierEventSink | None = None,
        *,
        is_cheaper: Callable[[int, int], bool] = _always,
        on_declined: Callable[[], None] = _unheard,
    ) -> None:
        """max_blocks: slots, of one block each. sink: hears of both tiers.

        is_cheaper: whether copying so many blocks back, after so many cached tokens, beats computing them;
        asked of a prompt any number of times. on_declined: called once where one starts for which it did not.
        Raises ConfigError for no slots.
        """
        if max_blocks < 1:
            raise ConfigError("max_blocks", max_blocks, "at least 1")
        self.max_blocks = max_blocks
        self.is_cheaper = is_cheaper
        self._on_declined = on_declined
        self.num_saved = self.num_loaded = 0  # blocks, since the start
        self.num_hits = 0  # found here by a prompt, and copied back
        self.num_declined = 0  # found here, and computed anew because that was cheaper
        self._sink = sink
        self._entries: OrderedDict[BlockHash, _Entry] = OrderedDict()  # next to be evicted first
        self._moving: dict[BlockHash, _Entry] = {}  # the pool has them too, parents first
        self._free_slots = list(range(max_blocks - 1, -1, -1))
        self._num_swapped = 0
        self._saves: dict[int, int] = {}  # slot -> block id
        self._loads: dict[int, int] = {}  # block id -> slot

    # -- the pool's side --------------------------------------------------------------------------

    def spill(self, block_id: int, block_hash: BlockHash, content: BlockContent, *, is_last: bool) -> None:
        """The pool evicts the last computed copy of this content: keep it, at the cost of the least recently
        used; if it is not the last of all, until the others are computed.

        O(1). Its keys and values stay in the block until the next forward.
        """
        assert block_hash not in self._entries, "evicted twice"
        assert block_hash not in self._moving, "evicted while it is being moved"
        assert block_id not in self._loads, "evicted before it was copied back"
        slot = self._take_slot()
        if slot is not None:
            (self._entries if is_last else self._moving)[block_hash] = _Entry(slot, content)
            self._saves[slot] = block_id

    def agrees(self, block_hash: BlockHash, content: BlockContent) -> bool:
        """Whether the hash names this content here too, or nothing. O(1)."""
        entry = self._entries.get(block_hash) or self._moving.get(block_hash)
        return entry is None or entry.content == content

    def stored(self, block_hash: BlockHash) -> None:
        """The pool has its first copy, computed or copied in the coming step."""
        is_here = block_hash in self._moving or self._start_moving(block_hash)
        if self._sink is not None:
            if is_here:
                self._sink.promoted(block_hash)
            else:
                self._sink.stored(block_hash)

    def removed(self, block_hash: BlockHash) -> None:
        """The pool's last copy is gone: evicted, or taken back before it was computed."""
        entry = self._moving.pop(block_hash, None)
        if entry is not None:
            self._entries[block_hash] = entry
        if self._sink is not None:
            if block_hash in self._entries:
                self._sink.demoted(block_hash)
            else:
                self._sink.removed(block_hash)

    # -- a prompt's side --------------------------------------------------------------------------

    def lookup(self, block_hash: BlockHash, content: BlockContent) -> int | None:
        """The slot of exactly this content, unless the pool is about to have it. O(1); changes nothing."""
        entry = self._entries.get(block_hash)
        return entry.slot if entry is not None and entry.content == content else None

    def hold(self, block_hashes: Iterable[BlockHash], slots: Sequence[int]) -> bool:
        """Keep these from eviction: they are about to be stored in the pool.

        False, and nothing changed, if one is not in its slot any more.
        """
        hashes = list(block_hashes)
        entries = [self._entries.get(block_hash) for block_hash in hashes]
        if [entry.slot if entry is not None else None for entry in entries] != list(slots):
            return False
        for block_hash in hashes:
            self._start_moving(block_hash)
        self.num_hits += len(hashes)
        return True

    def decline(self, num_blocks: int) -> None:
        """A prompt starts that computes so many blocks which it found here."""
        if num_blocks:
            self.num_declined += num_blocks
            self._on_declined()

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy each slot into its block before the coming forward."""
        self._loads.update(zip(block_ids, slots, strict=True))

    def cancel_loads(self, block_ids: Iterable[int]) -> None:
        """These blocks are given back: nothing need be copied into them."""
        if self._loads:
            for block_id in block_ids:
                self._loads.pop(block_id, None)

    # -- a sequence's own -------------------------------------------------------------------------

    def swap_out(self, block_ids: Sequence[int]) -> tuple[int, ...] | None:
        """Slots that these blocks are copied into, the caller's until `free`; None if so many cannot be had.

        At the cost of the least recently used entries. O(blocks).
        """
        if len(block_ids) > len(self._free_slots) + len(self._entries):
            return None
        slots: list[int] = []
        for block_id in block_ids:
            slot = self._take_slot()
            assert slot is not None, "there are as many"
            slots.append(slot)
            self._saves[slot] = block_id
        self._num_swapped += len(slots)
        return tuple(slots)

    def free(self, slots: Iterable[int]) -> None:
        """Slots that were swapped into are not needed any more."""
        for slot in slots:
            self._num_swapped -= 1
            self._give_back(slot)

    # -- a step -----------------------------------------------------------------------------------

    def take_moves(self) -> BlockMoves:
        """What is to be copied before the coming forward; the caller copies it. O(those)."""
        moves = BlockMoves(
            saves=tuple([(block_id, slot) for slot, block_id in self._saves.items()]),
            loads=tuple([(slot, block_id) for block_id, slot in self._loads.items()]),
        )
        self._saves.clear()
        self._loads.clear()
        self.num_saved += len(moves.saves)
        self.num_loaded += len(moves.loads)
        return moves

    def commit(self) -> None:
        """The step succeeded: what was moved is the pool's alone. O(moved)."""
        assert not self._saves, "a step was computed whose copies were not made"
        assert not self._loads, "a step was computed whose copies were not made"
        for entry in self._moving.values():
            self._give_back(entry.slot)
        self._moving.clear()

    def abort(self) -> None:
        """The step failed; the pool has taken back what it promised."""
        assert not self._moving, "the pool has it, and nobody computes it"
        self._loads.clear()

    def forget(self) -> None:
        """Nothing here is to be trusted: everything leaves, what was swapped out included.

        The pool, if it was about to have some of it, takes that back next (`abort`).
        """
        while self._entries:
            self._evict()
        self._moving.clear()
        self._free_slots = list(range(self.max_blocks - 1, -1, -1))
        self._num_swapped = 0
        self._saves.clear()
        self._loads.clear()

    def close(self) -> None:
        """Nothing comes here any more. What is here has been forgotten."""
        assert not self.num_used, "forget first"
        self._free_slots.clear()
        self.max_blocks = 0

    # -- what others may see ----------------------------------------------------------------------

    @property
    def num_cached(self) -> int:
        """Blocks that a prompt may find here."""
        return len(self._entries)

    @property
    def num_swapped(self) -> int:
        """Blocks of sequences that were swapped out."""
        return self._num_swapped

    @property
    def num_used(self) -> int:
        """Slots in use, whatever for: never more than `max_blocks`."""
        return self.max_blocks - len(self._free_slots)

    def totals(self) -> HostTotals:
        return HostTotals(
            used=self.num_used,
            total=self.max_blocks,
            swapped=self._num_swapped,
            hits=self.num_hits,
            declined=self.num_declined,
            saved=self.num_saved,
            loaded=self.num_loaded,
        )

    def hashes(self) -> list[BlockHash]:
        """Of what is here and not in the pool, next to be evicted first. O(cached); for tests."""
        return list(self._entries)

    # -- parts ------------------------------------------------------------------------------------

    def _start_moving(self, block_hash: BlockHash) -> bool:
        entry = self._entries.pop(block_hash, None)
        if entry is None:
            return False
        self._moving[block_hash] = entry
        return True

    def _take_slot(self) -> int | None:
        if not self._free_slots and self._entries:
            self._evict()
        return self._free_slots.pop() if self._free_slots else None

    def _evict(self) -> None:
        block_hash, entry = self._entries.popitem(last=False)
        self._give_back(entry.slot)
        if self._sink is not None:
            self._sink.dropped(block_hash)

    def _give_back(self, slot: int) -> None:
        self._saves.pop(slot, None)
        self._free_slots.append(slot)
