"""KV cache managers of a few blocks, and sequences of letters in them."""

from __future__ import annotations

from array import array

from cache.block_hash import BlockHasher
from cache.kv_cache_manager import KVCacheManager, PrefixHit, SequenceBlocks
from cache.types import pack_tokens
from tests.fakes.cache import a_fingerprint


def a_manager(num_blocks: int = 10, hasher: BlockHasher | None = None) -> KVCacheManager:
    return KVCacheManager(num_blocks, hasher or BlockHasher(a_fingerprint()), block_size=4)


def letters(text: str) -> array[int]:
    return pack_tokens(map(ord, text))


def start(manager: KVCacheManager, text: str, **begin: str) -> tuple[SequenceBlocks, PrefixHit]:
    """Begin, match and admit the whole prompt, within the step."""
    sequence = manager.begin(letters(text), **begin)  # type: ignore[arg-type]
    hit = manager.match(sequence)
    manager.admit(sequence, hit, len(text) - hit.num_tokens)
    return sequence, hit
