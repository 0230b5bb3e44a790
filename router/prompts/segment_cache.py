"""Token ids of segments seen before: turn n of a conversation tokenizes only what is new in it.

    render (0.1 ms) ──> split at special tokens ──> look up each segment ──> tokenize the missing ──> join

A segment's key is its exact text *and the salt of who sent it*. Tokenizing a long message takes
milliseconds, a look-up microseconds: with a shared key, a tenant could find out by the clock whether
somebody else has sent a text, just as with shared KV blocks. What keeps blocks apart keeps these apart too.
(What stays common is the room: one tenant's texts can push out another's, as in the KV cache.)

Knows texts and ids; knows neither templates nor requests. Safe from several threads.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from cache.types import pack_tokens
from router.prompts.segments import SegmentRule

DEFAULT_CACHE_BYTES = 64 << 20  # about 8 M tokens: a thousand conversations of 8k
# Of one entry beside its salt, text and ids: the key, the ordered dictionary (161 measured, before it grows).
_ENTRY_BYTES = 200
_MAX_SHARE = 8  # a segment larger than this part of the room is not kept: it would push out hundreds

_Key = tuple[str, str]  # salt, text


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Counters count from the start of the process."""

    num_bytes: int
    num_entries: int
    reused_tokens: int  # taken from the cache
    tokenized_tokens: int
    evicted_entries: int


@dataclass(frozen=True, slots=True)
class PartlyTokenized:
    """A text's segments, and the ids of those that were known."""

    salt: str
    segments: Sequence[str]
    ids: Sequence[bytes | None]  # packed int32; None = to be tokenized

    @property
    def missing_chars(self) -> int:
        """Characters still to be tokenized."""
        pairs = zip(self.segments, self.ids, strict=True)
        return sum([len(segment) for segment, ids in pairs if ids is None])


class SegmentCache:
    """Bounded by bytes; the least recently used segment goes first."""

    def __init__(self, rule: SegmentRule, max_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        """max_bytes: of salts, texts, ids and their keeping; 0 keeps nothing."""
        self._rule = rule
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards everything below; held for look-ups, never while tokenizing
        self._entries: OrderedDict[_Key, bytes] = OrderedDict()
        self._num_bytes = 0
        self._reused_tokens = 0
        self._tokenized_tokens = 0
        self._evicted_entries = 0

    def begin(self, text: str, salt: str) -> PartlyTokenized:
        """Cut the text and look its segments up. O(characters), some microseconds per thousand."""
        segments = self._rule.segmenter.split(text)
        entries = self._entries
        ids: list[bytes | None] = []
        reused = 0
        with self._lock:
            for segment in segments:
                key = (salt, segment)
                known = entries.get(key)
                if known is not None:
                    entries.move_to_end(key)
                    reused += len(known)
                ids.append(known)
            self._reused_tokens += reused // _ID_BYTES
        return PartlyTokenized(salt, segments, ids)

    def finish(self, begun: PartlyTokenized, *, add_special_tokens: bool) -> array[int]:
        """Tokenize what is missing, remember it, and join all: the ids of the whole, packed int32.

        add_special_tokens: put around them what the tokenizer puts around a text by default.
        Raises TypeError for a text that is not valid Unicode.
        """
        new: dict[str, bytes] = {}
        for segment, known in zip(begun.segments, begun.ids, strict=True):
            if known is None and segment not in new:
                new[segment] = pack_tokens(self._rule.encode(segment)).tobytes()
        if new:
            self._keep(begun.salt, new)
        joined = array("i", self._rule.prefix if add_special_tokens else ())
        joined.frombytes(
            b"".join(
                [
                    new[segment] if known is None else known
                    for segment, known in zip(begun.segments, begun.ids, strict=True)
                ]
            )
        )
        if add_special_tokens:
            joined.extend(self._rule.suffix)
        return joined

    def statistics(self) -> CacheStatistics:
        with self._lock:
            return CacheStatistics(
                num_bytes=self._num_bytes,
                num_entries=len(self._entries),
                reused_tokens=self._reused_tokens,
                tokenized_tokens=self._tokenized_tokens,
                evicted_entries=self._evicted_entries,
            )

    def _keep(self, salt: str, new: dict[str, bytes]) -> None:
        with self._lock:
            for segment, ids in new.items():
                self._tokenized_tokens += len(ids) // _ID_BYTES
                key, size = (salt, segment), _entry_bytes(salt, segment, ids)
                if size * _MAX_SHARE > self._max_bytes or key in self._entries:
                    continue
                self._entries[key] = ids
                self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                (salt, segment), ids = self._entries.popitem(last=False)
                self._num_bytes -= _entry_bytes(salt, segment, ids)
                self._evicted_entries += 1


_ID_BYTES = array("i").itemsize


def _entry_bytes(salt: str, segment: str, ids: bytes) -> int:
    """A salt is its request's: its segments have one, which each counts, since any may stay longest."""
    own = sys.getsizeof(salt) if salt else 0
    return own + sys.getsizeof(segment) + sys.getsizeof(ids) + _ENTRY_BYTES
