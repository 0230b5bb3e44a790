"""Hashes of prompts seen before: turn n of a conversation hashes only what is new in it.

    tokens   [ run 0 | run 1 | ... | run k | tail | rest )     a run: the blocks of about 1,024 tokens
    kept     each run under its tokens and the run before it, with the hashes of its blocks; and behind the
             last full run the blocks that were left: a next turn goes on in their middle

A run is found by a fast key and then compared, token by token, the run before it by identity: what is taken
from here is exact, whatever the hashes are, and 8,192 tokens are looked up in a tenth of the time it takes to
hash them, because the cost is in calls, not in bytes. The first run's predecessor is the root, tenant salt
included: no tenant finds another's.

Where a hash takes less than looking one up, nothing is kept (`room_for`).

Later runs leave before earlier ones: without those they would never be found.
Knows tokens and hashes; knows neither text nor replicas. Owner: the router's event loop;
`PartialChain.finish` may run on another thread.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from cache.block_hash import HASH_BYTES, BlockHasher, PackedHashes, lookup_key
from cache.types import BlockHash, little_endian_bytes, little_endian_view

RUN_TOKENS = 1024
DEFAULT_MAX_BYTES = 64 << 20  # about 12 M tokens in blocks of 16: 1,500 conversations of 8k
ENTRY_BYTES = 400  # of a run beside its tokens and hashes: key, bytes objects, tuple, ordered dictionary
TAIL = 1 << 64  # with the key of the run that it follows; keys of full runs have 64 bits


def room_for(hasher: BlockHasher) -> int:
    """Bytes that it pays to keep: 1,024 tokens are looked up in some 5 us, and hashed in 2 to 70."""
    return 0 if hasher.is_quick else DEFAULT_MAX_BYTES


class _Run(NamedTuple):
    """Blocks that follow one another, and what is before them."""

    before: _Run | BlockHash  # the root, before the first
    tokens: bytes
    hashes: bytes  # packed, as in `PackedHashes`

    def is_after(self, before: _Run | BlockHash) -> bool:
        return self.before is before or (isinstance(before, bytes) and self.before == before)

    @property
    def num_bytes(self) -> int:
        return len(self.tokens) + len(self.hashes) + ENTRY_BYTES


class PartialChain:
    """One prompt's hashes, as far as they were known; `finish` computes the others."""

    __slots__ = ("_hasher", "buffer", "keys", "packed", "root", "runs")

    def __init__(self, hasher: BlockHasher, root: BlockHash, buffer: bytes | memoryview) -> None:
        """buffer: the prompt's tokens, little-endian int32."""
        self._hasher = hasher
        self.root = root
        self.buffer = buffer
        self.packed = b""  # hashes of full blocks, parent first
        self.keys: Sequence[int] = ()  # what the root stands for, then each full run's
        self.runs: list[_Run] = []  # those that were known, in order; all of them once it is kept

    @property
    def hashes(self) -> PackedHashes:
        """Of full blocks, parent first: those that were known, all of them after `finish`."""
        return PackedHashes(self.packed)

    @property
    def num_missing_tokens(self) -> int:
        """Tokens of full blocks that `finish` would hash."""
        size = self._hasher.block_size
        return (len(self.buffer) // (4 * size) - len(self.packed) // HASH_BYTES) * size

    def finish(self) -> None:
        """Hash the rest. Touches nothing but this object."""
        done, size = len(self.packed) // HASH_BYTES, 4 * self._hasher.block_size
        blocks = len(self.buffer) // size
        if done < blocks:
            parent = BlockHash(self.packed[-HASH_BYTES:]) if done else self.root
            rest = memoryview(self.buffer)[done * size : blocks * size]
            self.packed += self._hasher.extend_packed(parent, rest)


@dataclass(frozen=True, slots=True)
class ChainStatistics:
    """Counters count from the start of the process."""

    num_bytes: int
    num_runs: int
    reused_blocks: int  # of prompts, whose hashes were known
    hashed_blocks: int  # of prompts, whose hashes had to be computed
    evicted_runs: int


class ChainCache:
    """Bounded by bytes; the least recently used run goes first."""

    def __init__(self, hasher: BlockHasher, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """max_bytes: of tokens, hashes and their keeping; 0 keeps nothing."""
        self._hasher = hasher
        self._max_bytes = max_bytes
        self._blocks = max(1, RUN_TOKENS // hasher.block_size)  # per full run
        self._block_bytes = 4 * hasher.block_size
        self._run_bytes = self._blocks * self._block_bytes
        self._runs: OrderedDict[int, _Run] = OrderedDict()
        self._num_bytes = 0
        self._num_reused = self._num_hashed = self._num_evicted = 0

    @property
    def num_runs(self) -> int:
        return len(self._runs)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def statistics(self) -> ChainStatistics:
        """O(1)."""
        return ChainStatistics(
            self._num_bytes, len(self._runs), self._num_reused, self._num_hashed, self._num_evicted
        )

    def chain(self, root: BlockHash, token_ids: array[int]) -> PackedHashes:
        """`BlockHasher.chain`, packed, hashing only what no earlier prompt began with."""
        chain = self.begin(root, token_ids)
        chain.finish()
        self.keep(chain)
        return chain.hashes

    def begin(self, root: BlockHash, token_ids: array[int]) -> PartialChain:
        """What is known of the prompt. `finish` it, then `keep` it: until then its tokens must not change.
        O(tokens), a tenth of hashing them."""
        if self._max_bytes:
            buffer = little_endian_bytes(token_ids)
            chain = PartialChain(self._hasher, root, buffer)
            self._find(chain, buffer)
        else:
            chain = PartialChain(self._hasher, root, little_endian_view(token_ids))
        self._num_reused += len(chain.packed) // HASH_BYTES
        self._num_hashed += chain.num_missing_tokens // self._hasher.block_size
        return chain

    def keep(self, chain: PartialChain) -> None:
        """Remember a finished chain. Runs it is made of are as if just used."""
        if not self._max_bytes:
            return
        step, run_bytes = HASH_BYTES * self._blocks, self._run_bytes
        buffer, packed, num_full = chain.buffer, chain.packed, len(chain.keys) - 1
        runs = chain.runs
        before: _Run | BlockHash = runs[-1] if runs else chain.root
        for number in range(len(runs), num_full):
            tokens = bytes(buffer[number * run_bytes : (number + 1) * run_bytes])
            before = _Run(before, tokens, packed[number * step : (number + 1) * step])
            runs.append(before)
        left = packed[num_full * step :]
        if left:
            start = num_full * run_bytes
            tokens = bytes(buffer[start : start + len(left) // HASH_BYTES * self._block_bytes])
            self._put(TAIL | chain.keys[-1], _Run(before, tokens, left))
        for key, run in zip(chain.keys[:0:-1], reversed(runs), strict=True):  # the first one leaves last
            self._put(key, run)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._runs.popitem(last=False)[1].num_bytes
            self._num_evicted += 1

    def _find(self, chain: PartialChain, buffer: bytes) -> None:
        """Fill in what is known of the prompt of these tokens."""
        chain.keys = self._keys(chain)
        runs, before, known = self._runs, cast("_Run | BlockHash", chain.root), []
        start = 0
        for key in chain.keys[1:]:
            run = runs.get(key)
            if run is None or not run.is_after(before) or not buffer.startswith(run.tokens, start):
                break
            known.append(run.hashes)
            chain.runs.append(run)
            before = run
            start += self._run_bytes
        tail = runs.get(TAIL | chain.keys[len(chain.runs)])
        if tail is not None and tail.is_after(before):
            known.append(self._beginning(tail, buffer, start))
        chain.packed = b"".join(known)

    def _put(self, key: int, run: _Run) -> None:
        """It is the one of that key, and as if just used."""
        old = self._runs.get(key)
        if old is not run:
            self._num_bytes += run.num_bytes - (old.num_bytes if old is not None else 0)
            self._runs[key] = run
        self._runs.move_to_end(key)

    def _keys(self, chain: PartialChain) -> list[int]:
        """What the root stands for, then each full run's key: of its tokens and the key before."""
        tokens, step = memoryview(chain.buffer), self._run_bytes
        key = int.from_bytes(chain.root[:8], "little")
        ends = range(step, len(tokens) + 1, step)
        return [key, *[key := lookup_key(tokens[end - step : end], key) for end in ends]]

    def _beginning(self, tail: _Run, buffer: bytes, start: int) -> bytes:
        """Hashes of the tail's blocks that the tokens go on with from there."""
        if buffer.startswith(tail.tokens, start):  # a next turn
            return tail.hashes
        size, tokens = self._block_bytes, buffer[start : start + len(tail.tokens)]
        low, high = 0, len(tokens) // size
        while low < high:  # `low` blocks agree; more than `high` do not
            middle = (low + high + 1) // 2
            if tail.tokens[low * size : middle * size] == tokens[low * size : middle * size]:
                low = middle
            else:
                high = middle - 1
        return tail.hashes[: HASH_BYTES * low]
