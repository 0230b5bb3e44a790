"""The hash rule: the only place in the project that hashes blocks.

    root = H(format version, block size, model id, revision, KV dtype, adapter name, adapter digest, salt)
    h_i  = H(h_{i-1}, tokens_i as little-endian int32, extra_keys_i)      h_{-1} = root

Only full blocks have a hash; a hash names the whole prefix. 128-bit digests, stable across
processes and restarts (never Python's `hash()`).

Encoding, unambiguous by construction:
    root    tag, then every field as 4-byte little-endian length + bytes
    block   parent (16 bytes) + tokens (4 * block_size bytes) + per extra key: length + bytes
The root is always SHA-256, whatever the fingerprint's algorithm: it is computed once per request
and is the wall between tenants, so nobody shall be able to forge another salt's root.

Knows tokens and fingerprints; knows neither blocks' places nor sequences.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast, overload

import xxhash

try:
    import cache.native.chains as compiled
except ModuleNotFoundError:  # no C compiler where this was installed: the same hashes, with a call for each
    compiled = None  # type: ignore[assignment]

from cache.errors import ConfigError
from cache.fingerprint import Fingerprint, HashAlgorithm
from cache.types import BlockHash, HashHint, little_endian_bytes

# Another value makes every replica's hashes unknown to routers of the old one: bump it with the rule.
HASH_FORMAT_VERSION = 1
HASH_BYTES = 16
CUT_AT_ONCE = 128  # pieces
IS_COMPILED = compiled is not None  # whether chains are made in C

ExtraKeys = Mapping[int, tuple[bytes, ...]]
"""Block index -> image/audio hashes of the placeholder tokens that the block touches."""


class Placeholder(NamedTuple):
    """A run of tokens that stands for an image or a piece of audio."""

    first_token: int
    num_tokens: int
    content_hash: bytes


class BlockHasher:
    """Hashes prompts under one fingerprint. Stateless after construction; thread-safe."""

    __slots__ = ("_digest", "_joined", "_links", "_root_head", "block_size", "is_quick")

    def __init__(self, fingerprint: Fingerprint) -> None:
        if fingerprint.block_size < 1:
            raise ConfigError("block_size", fingerprint.block_size, "at least 1 token")
        self.block_size = fingerprint.block_size
        self._digest = _DIGESTS[fingerprint.hash_algorithm]
        block_bytes = 4 * fingerprint.block_size
        self._links, self._joined = _chains(fingerprint.hash_algorithm, block_bytes)
        # A token then takes less than to look up whether its block's hash is known.
        self.is_quick = fingerprint.hash_algorithm is HashAlgorithm.XXH3_128 and _is_in_c(block_bytes)
        self._root_head = b"warmpath root" + _prefixed(
            HASH_FORMAT_VERSION.to_bytes(4, "little"),
            fingerprint.block_size.to_bytes(4, "little"),
            _utf8(fingerprint.model_id),
            _utf8(fingerprint.revision),
            _utf8(fingerprint.kv_dtype),
        )

    def root(self, adapter: str = "", adapter_digest: str = "", salt: str = "") -> BlockHash:
        """Parent of a sequence's first block: another salt or adapter changes every hash after it."""
        fields = _prefixed(_utf8(adapter), _utf8(adapter_digest), _utf8(salt))
        return BlockHash(_sha256(self._root_head + fields))

    def extend(
        self,
        parent: BlockHash,
        token_ids: array[int],
        first_block: int,
        last_block: int,
        extra_keys: ExtraKeys | None = None,
    ) -> list[BlockHash]:
        """Hashes of blocks [first_block, last_block) of `token_ids`; `parent` precedes the first."""
        size = self.block_size
        buffer = little_endian_bytes(token_ids[first_block * size : last_block * size])
        step = 4 * size
        assert len(buffer) == max(last_block - first_block, 0) * step, "hashed past the last full block"
        if not extra_keys:
            return self._links(parent, buffer)
        digest = self._digest
        previous: bytes = parent
        hashes: list[BlockHash] = []
        for index in range(first_block, last_block):
            start = (index - first_block) * step
            message = previous + buffer[start : start + step] + _prefixed(*extra_keys.get(index, ()))
            previous = digest(message)
            hashes.append(BlockHash(previous))
        return hashes

    def extend_packed(self, parent: BlockHash, tokens: bytes | memoryview) -> bytes:
        """`extend` by blocks of text whose tokens are little-endian int32 already; its hashes, joined."""
        assert len(tokens) % (4 * self.block_size) == 0, "hashed past the last full block"
        return self._joined(parent, tokens)

    def contents(self, token_ids: array[int], first_block: int, last_block: int) -> list[bytes]:
        """What an exact hit compares, of blocks [first_block, last_block): equal for equal tokens only."""
        size = self.block_size
        buffer = little_endian_bytes(token_ids[first_block * size : last_block * size])
        step = 4 * size
        return [buffer[start : start + step] for start in range(0, len(buffer), step)]

    def chain(
        self, root: BlockHash, token_ids: array[int], extra_keys: ExtraKeys | None = None
    ) -> list[BlockHash]:
        """Hashes of all full blocks of `token_ids`, parent first."""
        return self.extend(root, token_ids, 0, len(token_ids) // self.block_size, extra_keys)


class PackedHashes(Sequence[BlockHash]):
    """Hashes one after another in one piece of memory; one becomes an object when it is looked at.

    The Router's form of a prompt's chain, and the wire's: of 512 hashes a decision looks at a dozen hints,
    and 512 objects take longer to make and to free than all that is done with them.
    Immutable; equal to another of the same hashes, and to no list or tuple.
    """

    __slots__ = ("packed",)

    def __init__(self, packed: bytes = b"") -> None:
        """packed: 16 bytes each."""
        assert len(packed) % HASH_BYTES == 0, "cut in the middle of a hash"
        self.packed = packed

    @classmethod
    def of(cls, block_hashes: Iterable[BlockHash]) -> PackedHashes:
        """These hashes; what is packed already is not copied."""
        return block_hashes if isinstance(block_hashes, cls) else cls(b"".join(block_hashes))

    def __len__(self) -> int:
        return len(self.packed) // HASH_BYTES

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> PackedHashes: ...
    def __getitem__(self, index: int | slice) -> BlockHash | PackedHashes:
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            if step != 1:
                return PackedHashes.of([self[place] for place in range(first, last, step)])
            return PackedHashes(self.packed[HASH_BYTES * first : HASH_BYTES * last])
        start = HASH_BYTES * range(len(self))[index]
        return BlockHash(self.packed[start : start + HASH_BYTES])

    def __iter__(self) -> Iterator[BlockHash]:
        return _single_hashes(self.packed)

    def __add__(self, others: Iterable[BlockHash]) -> PackedHashes:
        return PackedHashes(self.packed + PackedHashes.of(others).packed)

    def __eq__(self, other: object) -> bool:
        return self.packed == other.packed if isinstance(other, PackedHashes) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.packed)

    def __repr__(self) -> str:
        return f"PackedHashes({len(self)} hashes)"

    def __reduce__(self) -> tuple[type[PackedHashes], tuple[bytes]]:
        return PackedHashes, (self.packed,)


def _cutter(size: int) -> Callable[[bytes | memoryview], Iterator[bytes]]:
    """What cuts a buffer into pieces of so many bytes, many with one call: one call for each takes longer
    than anything that is done with a hash, and a seventh of the time that hashing a block takes."""
    singles, runs = struct.Struct(f"{size}s").iter_unpack, struct.Struct(f"{size}s" * CUT_AT_ONCE).iter_unpack
    run_bytes = size * CUT_AT_ONCE

    def cut(buffer: bytes | memoryview) -> Iterator[bytes]:
        view, whole = memoryview(buffer), len(buffer) // run_bytes * run_bytes
        tuples = itertools.chain(runs(view[:whole]), singles(view[whole:]))
        return itertools.chain.from_iterable(tuples)

    return cut


_single_hashes = cast("Callable[[bytes], Iterator[BlockHash]]", _cutter(HASH_BYTES))


def hint(block_hash: BlockHash) -> HashHint:
    """The low 64 bits (first 8 bytes, little-endian): what the router sees."""
    return HashHint(int.from_bytes(block_hash[:8], "little"))


def hints(block_hashes: Sequence[BlockHash]) -> list[HashHint]:
    """`hint` of each, in order."""
    return list(hint_view(block_hashes))


def hint_view(block_hashes: Sequence[BlockHash]) -> Sequence[HashHint]:
    """`hint` of each, in order, made into a number when it is looked at.

    A match looks at a dozen of a prompt's 512, and every request pays for the others on the router's event
    loop: three times less than for `hints`, and nothing per block if they are packed.
    """
    joined = PackedHashes.of(block_hashes).packed
    if sys.byteorder == "big":  # pragma: no cover - CI's machines are little-endian
        swapped = array("Q", joined)
        swapped.byteswap()
        joined = swapped.tobytes()
    return cast("Sequence[HashHint]", memoryview(joined).cast("Q")[::2])


def lookup_key(message: bytes | memoryview, before: int) -> int:
    """64 bits to look bytes up by that are then compared: fast, well spread, and forgeable. Names no block.

    before: the key of what precedes them.
    """
    return xxhash.xxh3_64_intdigest(message, before)


def placeholder_keys(placeholders: Iterable[Placeholder], block_size: int) -> dict[int, tuple[bytes, ...]]:
    """Extra keys of every block that a placeholder token falls into, in the order given.

    A key holds the run's place as well as its content: placeholder tokens are all alike, so with
    the contents alone two images of 10 and 6 tokens could not be told from the same two of 6 and 10.
    """
    keys: dict[int, tuple[bytes, ...]] = {}
    for first_token, num_tokens, content_hash in placeholders:
        if num_tokens < 1:
            continue
        key = content_hash + struct.pack("<qq", first_token, num_tokens)
        for index in range(first_token // block_size, (first_token + num_tokens - 1) // block_size + 1):
            keys[index] = (*keys.get(index, ()), key)
    return keys


def _prefixed(*fields: bytes) -> bytes:
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)


def _utf8(text: str) -> bytes:
    # A client's salt may hold a lone surrogate (JSON can spell one): still one text, one encoding.
    return text.encode("utf-8", "surrogatepass")


def _sha256(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()[:HASH_BYTES]


# A prompt's hashing is on the path to its first token, 512 blocks for 8,192 tokens: in C, or one loop per
# algorithm, with nothing in it that is the same for every block. Calling `_sha256` or `BlockHash` would cost
# a fifth.

_Tokens = bytes | memoryview
_Links = Callable[[bytes, _Tokens], list[BlockHash]]
_Joined = Callable[[bytes, _Tokens], bytes]


def _chains(algorithm: HashAlgorithm, block_bytes: int) -> tuple[_Links, _Joined]:
    """What makes, of a parent and blocks of so many bytes, the hashes of all: each by itself, and joined."""
    if _is_in_c(block_bytes):
        in_c = {HashAlgorithm.XXH3_128: compiled.xxh3_chain, HashAlgorithm.SHA256: compiled.sha256_chain}
        joined = functools.partial(in_c[algorithm], block_bytes)
        return lambda parent, tokens: list(_single_hashes(joined(parent, tokens))), joined
    chain, cut = _CHAINS[algorithm], _cutter(block_bytes)
    return (
        lambda parent, tokens: chain(parent, cut(tokens)),
        lambda parent, tokens: b"".join(chain(parent, cut(tokens))),
    )


def _is_in_c(block_bytes: int) -> bool:
    return compiled is not None and block_bytes <= compiled.MOST_BLOCK_BYTES


def _xxh3_chain(parent: bytes, blocks: Iterator[bytes]) -> list[BlockHash]:
    digest = xxhash.xxh3_128_digest
    hashes = [parent := digest(parent + block) for block in blocks]
    return cast("list[BlockHash]", hashes)


def _sha256_chain(parent: bytes, blocks: Iterator[bytes]) -> list[BlockHash]:
    sha256 = hashlib.sha256
    hashes = [parent := sha256(parent + block).digest()[:HASH_BYTES] for block in blocks]
    return cast("list[BlockHash]", hashes)


_CHAINS: dict[HashAlgorithm, Callable[[bytes, Iterator[bytes]], list[BlockHash]]] = {
    HashAlgorithm.XXH3_128: _xxh3_chain,
    HashAlgorithm.SHA256: _sha256_chain,
}

_DIGESTS: dict[HashAlgorithm, Callable[[bytes], bytes]] = {
    HashAlgorithm.XXH3_128: xxhash.xxh3_128_digest,
    HashAlgorithm.SHA256: _sha256,
}
