"""What a sequence's blocks are called, and what each has to hold. Hashed when asked for.

Knows sequences and the hasher; knows neither what is in the pool nor in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from cache.block_hash import BlockHasher
from cache.block_pool import BlockContent
from cache.sequence_blocks import SequenceBlocks
from cache.types import BlockHash

PIECE_BLOCKS = 32  # a miss at the first block should not pay for describing a whole long prompt

Place = TypeVar("Place")


class SequenceNames:
    """Writes `SequenceBlocks.block_hashes`, and nothing else."""

    def __init__(self, hasher: BlockHasher) -> None:
        self._hasher = hasher

    def are_of(self, sequence: SequenceBlocks, block_hashes: Sequence[BlockHash]) -> bool:
        """Whether hashes that somebody else sent are its blocks': the first is, and the last follows."""
        last = len(block_hashes) - 1
        if last >= len(sequence.token_ids) // self._hasher.block_size:
            return False
        parents = {0: sequence.root, last: block_hashes[last - 1] if last else sequence.root}
        return all(
            [block_hashes[index]]
            == self._hasher.extend(parent, sequence.token_ids, index, index + 1, sequence.extra_keys)
            for index, parent in parents.items()
        )

    def hash_up_to(self, sequence: SequenceBlocks, num_blocks: int) -> None:
        hashes = sequence.block_hashes
        if len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else sequence.root
            hashes += self._hasher.extend(
                parent, sequence.token_ids, len(hashes), num_blocks, sequence.extra_keys
            )

    def contents(self, sequence: SequenceBlocks, first_block: int, last_block: int) -> list[BlockContent]:
        """What blocks [first_block, last_block) hold once computed. Their hashes must be there."""
        hashes, root, extra_keys = sequence.block_hashes, sequence.root, sequence.extra_keys
        tokens = self._hasher.contents(sequence.token_ids, first_block, last_block)
        return [
            BlockContent(
                root,
                index,
                hashes[index - 1] if index else root,
                block_tokens,
                extra_keys.get(index, ()) if extra_keys else (),
            )
            for index, block_tokens in enumerate(tokens, first_block)
        ]

    def find(
        self,
        sequence: SequenceBlocks,
        first: int,
        limit: int,
        lookup: Callable[[BlockHash, BlockContent], Place | None],
    ) -> list[Place]:
        """Where the sequence's blocks from `first` on are, up to `limit` and without gaps. O(found)."""
        self.hash_up_to(sequence, limit)
        found: list[Place] = []
        for start in range(first, limit, PIECE_BLOCKS):
            end = min(start + PIECE_BLOCKS, limit)
            contents = self.contents(sequence, start, end)
            for block_hash, content in zip(sequence.block_hashes[start:end], contents, strict=True):
                place = lookup(block_hash, content)
                if place is None:
                    return found
                found.append(place)
        return found
