"""The hash rule: the only place in the project that hashes blocks.

    root = H(format version, model id, revision, KV dtype, adapter name, adapter digest, salt)
    h_i  = H(h_{i-1}, tokens_i as little-endian int32, extra_keys_i)      h_{-1} = root

Only full blocks have a hash; a hash names the whole prefix. 128-bit digests, stable across
processes and restarts (never Python's `hash()`).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from cache.fingerprint import Fingerprint
from cache.types import BlockHash, HashHint

ExtraKeys = Mapping[int, tuple[bytes, ...]]
"""Block index -> image/audio hashes of the placeholder tokens that the block touches."""


class BlockHasher:
    """Hashes prompts under one fingerprint. Stateless after construction; thread-safe."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        raise NotImplementedError

    def root(self, adapter: str = "", adapter_digest: str = "", salt: str = "") -> BlockHash:
        raise NotImplementedError

    def extend(
        self,
        parent: BlockHash,
        token_ids: array[int],
        first_block: int,
        last_block: int,
        extra_keys: ExtraKeys | None = None,
    ) -> list[BlockHash]:
        """Hashes of blocks [first_block, last_block) of `token_ids`; `parent` precedes the first."""
        raise NotImplementedError

    def chain(self, root: BlockHash, token_ids: array[int], extra_keys: ExtraKeys | None = None) -> list[BlockHash]:
        """Hashes of all full blocks of `token_ids`, parent first."""
        raise NotImplementedError


def hint(block_hash: BlockHash) -> HashHint:
    """The low 64 bits (first 8 bytes, little-endian): what the router sees."""
    raise NotImplementedError


def hints(block_hashes: Sequence[BlockHash]) -> list[HashHint]:
    raise NotImplementedError
