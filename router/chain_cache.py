"""Hashes of prompts seen before: turn n of a conversation hashes only what is new in it.

    tokens   [ stride 0 | stride 1 | ... | stride k | rest )     a stride: the blocks of about 1,024 tokens
    names    root -> H(root, stride 0) -> H(that, stride 1) -> ...   each names the whole prefix, like a block
    kept     name of a stride -> the hashes of its blocks

Naming 8,192 tokens by stride takes a tenth of the time that naming them block by block takes, because the
cost is in calls, not in bytes. The names are made with the block hash's own algorithm from the same root,
tenant salt included: they are no easier to forge than what they stand for, and no tenant finds another's.

A prompt's later strides leave before its first ones: without those they would never be found.
Knows tokens and hashes; knows neither text nor replicas. Owner: the router's event loop;
`PartialChain.finish` may run on another thread.
"""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from cache.block_hash import HASH_BYTES, BlockHasher
from cache.types import BlockHash, little_endian_bytes

STRIDE_TOKENS = 1024  # what a next turn hashes again, at most; and 1 KiB kept for 64 blocks of 16
DEFAULT_MAX_BYTES = 32 << 20  # about 24 M tokens in blocks of 16: three thousand conversations of 8k
ENTRY_BYTES = 230  # of an entry beside its hashes: name, bytes object, ordered dictionary


class PartialChain:
    """One prompt's hashes, as far as they were known; `finish` computes the others."""

    __slots__ = ("_hasher", "_token_ids", "hashes", "names", "num_known_strides", "root")

    def __init__(
        self,
        hasher: BlockHasher,
        root: BlockHash,
        token_ids: array[int],
        names: Sequence[bytes],
        num_known_strides: int,
        hashes: list[BlockHash],
    ) -> None:
        self._hasher = hasher
        self._token_ids = token_ids
        self.root = root
        self.names = names  # of every full stride
        self.num_known_strides = num_known_strides
        self.hashes = hashes  # of full blocks, parent first

    @property
    def num_missing_tokens(self) -> int:
        """Tokens of full blocks that `finish` would hash."""
        size = self._hasher.block_size
        return len(self._token_ids) // size * size - len(self.hashes) * size

    def finish(self) -> None:
        """Hash the rest. Touches nothing but this object."""
        done, blocks = len(self.hashes), len(self._token_ids) // self._hasher.block_size
        if done < blocks:
            parent = self.hashes[-1] if done else self.root
            self.hashes += self._hasher.extend(parent, self._token_ids, done, blocks)


class ChainCache:
    """Bounded by bytes; the least recently used stride goes first."""

    def __init__(self, hasher: BlockHasher, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """max_bytes: of hashes, names and their keeping; 0 keeps nothing."""
        self._hasher = hasher
        self._blocks = max(1, STRIDE_TOKENS // hasher.block_size)  # per stride
        self._entry_bytes = HASH_BYTES * self._blocks + ENTRY_BYTES
        self._max_entries = max_bytes // self._entry_bytes
        self._unpack = struct.Struct(f"{HASH_BYTES}s" * self._blocks).unpack
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()  # name -> hashes, joined

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    def num_bytes(self) -> int:
        return self._entry_bytes * len(self._entries)

    def chain(self, root: BlockHash, token_ids: array[int]) -> list[BlockHash]:
        """`BlockHasher.chain`, hashing only what no earlier prompt began with."""
        chain = self.begin(root, token_ids)
        chain.finish()
        self.keep(chain)
        return chain.hashes

    def begin(self, root: BlockHash, token_ids: array[int]) -> PartialChain:
        """What is known of the prompt. `finish` it, then `keep` it. O(tokens), a tenth of hashing them."""
        names = self._names(root, token_ids) if self._max_entries else []
        entries, hashes = self._entries, list[BlockHash]()
        num_known = 0
        for name in names:
            known = entries.get(name)
            if known is None:
                break
            hashes += self._unpack(known)
            num_known += 1
        return PartialChain(self._hasher, root, token_ids, names, num_known, hashes)

    def keep(self, chain: PartialChain) -> None:
        """Remember a finished chain. Strides it was made of are as if just used."""
        entries, step = self._entries, self._blocks
        for stride in range(len(chain.names) - 1, -1, -1):  # so that the first one leaves last
            name = chain.names[stride]
            if name not in entries:
                entries[name] = b"".join(chain.hashes[stride * step : (stride + 1) * step])
            entries.move_to_end(name)
        while len(entries) > self._max_entries:
            entries.popitem(last=False)

    def _names(self, root: BlockHash, token_ids: array[int]) -> list[bytes]:
        buffer = little_endian_bytes(token_ids)
        digest, step = self._hasher.digest, 4 * self._blocks * self._hasher.block_size
        name: bytes = root
        names = []
        for start in range(0, len(buffer) - step + 1, step):
            name = digest(name + buffer[start : start + step])
            names.append(name)
        return names
