"""Which slots a sequence uses, with a radix tree for memory: `PrefixCache` to the token.

    table   [0, hit) shared   [hit, depth) of this step   [depth, end) a fork's own slot, not yet used

As with blocks, what is scheduled is in the tree at once, as a promise. What is computed although the tree has
it (the last token of a prompt that is cached whole, twins that decode side by side) goes into slots of the
sequence's own; the commit puts the tree's in their place and frees them: a tree holds nothing twice.
For measurement and simulation: it tells nobody what it stores, because routers know blocks.
Knows tokens and slots; knows neither blocks nor hashes but the root's. Not thread-safe: engine thread only.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from cache.block_hash import BlockHasher
from cache.cache_stats import CacheStats
from cache.errors import BlocksAwaited, BlocksInUse, ConfigError, NoFreeBlocks, StaleHit
from cache.radix_tree import TOKEN_BYTES, Node, Place, RadixTree
from cache.sequence_blocks import PrefixHit, SequenceBlocks
from cache.types import little_endian_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RadixHit(PrefixHit):
    """A hit, and where in the tree it ends."""

    place: Place


@dataclass(slots=True, eq=False)
class _Claim:
    """A sequence's place in the tree."""

    node: Node  # where its tokens end
    depth: int  # tokens from the root to there
    # Slots of its own for tokens that the tree had already: the first one's position, and the tree's slots.
    doubles: list[tuple[int, list[int]]] = field(default_factory=list)
    num_promised: int = 0  # its last tokens: promised in this step


class RadixCache:
    """Owns the tree and every `SequenceBlocks` that it began. A block is one token."""

    block_size = 1
    prefix_caching = True

    def __init__(self, num_slots: int, hasher: BlockHasher) -> None:
        """hasher: names roots, so that other salts share nothing. Raises ConfigError for no slots."""
        if num_slots < 1:
            raise ConfigError("num_slots", num_slots, "at least 1")
        self.tree = RadixTree(num_slots)
        self._hasher = hasher
        self._claims: dict[SequenceBlocks, _Claim] = {}  # of those that hold slots
        self._stepping: dict[SequenceBlocks, _Claim] = {}  # of those, with something to commit

    @property
    def num_free(self) -> int:
        return self.tree.num_free

    def begin(self, token_ids: array[int], *, salt: str = "", looks_up: bool = True) -> SequenceBlocks:
        return SequenceBlocks(token_ids, self._hasher.root(salt=salt), looks_up=looks_up)

    def match(self, sequence: SequenceBlocks) -> RadixHit:
        tree, limit = self.tree, len(sequence.token_ids) - 1
        tokens = little_endian_bytes(sequence.token_ids[: limit if sequence.looks_up else 0])
        place = tree.find(sequence.root, tokens)
        slots = _slots(place)
        return RadixHit(tuple(slots), len(slots), _num_idle(place), tree.changes, place=place)

    def allow_hits(self, sequence: SequenceBlocks) -> None:
        sequence.looks_up = True

    def new_blocks(self, num_tokens: int) -> int:
        return num_tokens

    def blocks_needed(self, sequence: SequenceBlocks, hit: PrefixHit, num_tokens: int) -> int:
        return num_tokens + hit.num_idle

    def admit(self, sequence: SequenceBlocks, hit: PrefixHit, num_tokens: int) -> None:
        assert isinstance(hit, RadixHit), "a hit of another cache"
        assert not sequence.block_table, "admitted twice: release the sequence first"
        assert hit.num_tokens + num_tokens <= len(sequence.token_ids), "no such tokens to compute"
        place = hit.place
        if hit.removals != self.tree.changes:
            place = self._find_again(sequence, hit)
        num_idle = _num_idle(place)  # others may have taken some since, or given some back
        if num_tokens + num_idle > self.num_free:
            raise NoFreeBlocks(needed=num_tokens + num_idle, free=self.num_free)
        if not place.depth:
            place = Place(self.tree.root(sequence.root), 0, 0)
        node = self.tree.use(place)  # before allocating, which might evict it
        self._claims[sequence] = _Claim(node, place.depth)
        sequence.block_table.extend(hit.block_ids)
        sequence.block_table.extend(self.tree.allocate(num_tokens))
        self._promise(sequence, hit.num_tokens + num_tokens)

    def fork(self, parent: SequenceBlocks, child: SequenceBlocks, num_tokens: int) -> None:
        assert not child.block_table, "forked into a sequence that holds blocks"
        assert not self.tree.has_promises, "what this step computes is not there yet: fork after the commit"
        node, end = self._claims[parent].node, self._claims[parent].depth
        slots = self.tree.allocate(1)
        while end - len(node) >= num_tokens and node.parent is not None:
            end -= len(node)
            node = node.parent
        offset = num_tokens - (end - len(node)) if node.parent is not None else 0
        self._claims[child] = _Claim(self.tree.use(Place(node, offset, num_tokens)), num_tokens)
        child.block_table += [*parent.block_table[:num_tokens], *slots]

    def grow(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        assert num_tokens <= len(sequence.token_ids), "no such tokens to compute"
        self.reserve(sequence, num_tokens)
        self._promise(sequence, num_tokens)

    def reserve(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        num_new = num_tokens - len(sequence.block_table)
        if num_new > 0:
            sequence.block_table.extend(self.tree.allocate(num_new))

    def num_own(self, sequence: SequenceBlocks) -> int:
        """Exact. O(nodes of its path)."""
        claim = self._claims[sequence]
        num_own = len(sequence.block_table) - claim.depth
        for node in claim.node.path():
            if node.ref_count > 1:
                break
            num_own += len(node)
        return num_own

    @property
    def sharings(self) -> int:
        return self.tree.sharings

    def is_awaited(self, sequence: SequenceBlocks) -> bool:
        """Also where another one of this step computes the same tokens, into slots of its own."""
        claim = self._stepping.get(sequence)
        return claim is not None and any(node.ref_count > 1 for node in _own_promises(claim))

    def release(self, sequence: SequenceBlocks) -> None:
        if self.is_awaited(sequence):
            raise BlocksAwaited
        claim = self._claims.pop(sequence, None)
        if claim is None:
            return
        if self._stepping.pop(sequence, None) is not None:
            self.tree.withdraw(_own_promises(claim))
        table = sequence.block_table
        for first, have in claim.doubles:
            self.tree.free(table[first : first + len(have)])
        self.tree.free(table[claim.depth :])
        self.tree.leave(claim.node)
        table.clear()

    def swap_out(self, sequence: SequenceBlocks, num_tokens: int) -> bool:
        """It has no memory but its slots."""
        return False

    def commit_step(self) -> None:
        """The forward succeeded: promises are kept, and the tree's slots take the place of doubles."""
        self.tree.keep_all()
        for sequence, claim in self._stepping.items():
            table = sequence.block_table
            for first, have in claim.doubles:
                last = first + len(have)
                self.tree.free(table[first:last])
                table[first:last] = have
            if claim.doubles:  # those ahead of it may have parted there, and now go on together
                self.tree.join_parent(claim.node)
            claim.doubles.clear()
            claim.num_promised = 0
        self._stepping.clear()

    def abort_step(self) -> None:
        for claim in self._stepping.values():
            claim.num_promised = 0
        self._stepping.clear()
        self.tree.withdraw_all()

    def clear(self) -> None:
        used = self.tree.num_slots - self.num_free
        if used:
            raise BlocksInUse(used=used)
        self.tree.evict_all()

    def stats(self) -> CacheStats:
        total, free = self.tree.num_slots, self.num_free
        return CacheStats(total, free, total - free, self.tree.num_cached, pinned=0)

    def _find_again(self, sequence: SequenceBlocks, hit: RadixHit) -> Place:
        """The hit's end in a tree that has changed. Raises StaleHit."""
        if not hit.num_tokens:
            return hit.place
        tokens = little_endian_bytes(sequence.token_ids[: hit.num_tokens])
        place = self.tree.find(sequence.root, tokens)
        if place.depth < hit.num_tokens or tuple(_slots(place)) != hit.block_ids:
            raise StaleHit(num_blocks=hit.num_tokens)
        return place

    def _promise(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Put the tokens between its place in the tree and `num_tokens` there."""
        assert sequence not in self._stepping, "scheduled twice in one step"
        claim = self._claims[sequence]
        first = claim.depth
        if first == num_tokens:
            return
        tokens = little_endian_bytes(sequence.token_ids[first:num_tokens])
        node, have = self.tree.extend(claim.node, tokens, sequence.block_table[first:num_tokens])
        if have:
            claim.doubles.append((first, have))
        claim.node, claim.depth, claim.num_promised = node, num_tokens, len(tokens) // TOKEN_BYTES - len(have)
        self._stepping[sequence] = claim


def _own_promises(claim: _Claim) -> list[Node]:
    """The nodes that hold what it has promised, children before parents: one, unless others split it."""
    nodes: list[Node] = []
    left = claim.num_promised
    for node in claim.node.path():
        if not left:
            break
        nodes.append(node)
        left -= len(node)
    return nodes


def _slots(place: Place) -> list[int]:
    """Of every token up to the place."""
    slots = place.node.slots[: place.offset]
    pieces = [slots]
    if place.node.parent is not None:
        pieces += [node.slots for node in place.node.parent.path()]
    return [slot for piece in reversed(pieces) for slot in piece]


def _num_idle(place: Place) -> int:
    """Of the tokens up to the place, those in nodes that nobody uses."""
    node, num_idle = place.node, 0
    if node.ref_count == 0:
        num_idle += place.offset
    if node.parent is not None:
        num_idle += sum(len(above) for above in node.parent.path() if above.ref_count == 0)
    return num_idle
