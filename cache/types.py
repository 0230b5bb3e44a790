"""Names for the values that look alike: ids and hashes. Knows nothing else."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""16 bytes naming a whole prefix: one full block's tokens and everything before it."""

HashHint = NewType("HashHint", int)
"""Low 64 bits of a `BlockHash`: all the router ever sees of the cache."""

ReplicaId = NewType("ReplicaId", str)
RequestId = NewType("RequestId", str)

PinId = NewType("PinId", str)
"""Names one pinned prefix on every replica that holds it."""


if array("i").itemsize != 4:  # pragma: no cover - true of every platform CPython supports today
    raise ImportError("array('i') is not 32 bits wide on this platform")


def pack_tokens(token_ids: Iterable[int]) -> array[int]:
    """Token ids as packed int32. Raises OverflowError for an id outside int32."""
    return array("i", token_ids)


def little_endian_bytes(token_ids: array[int]) -> bytes:
    """The ids' bytes as little-endian int32, whatever this machine's order: what gets hashed."""
    if sys.byteorder == "big":
        token_ids = token_ids[:]
        token_ids.byteswap()
    return token_ids.tobytes()


def little_endian_view(token_ids: array[int]) -> bytes | memoryview:
    """`little_endian_bytes` without a copy, where this machine's order is that: the array must not change as
    long as the view is there."""
    return little_endian_bytes(token_ids) if sys.byteorder == "big" else memoryview(token_ids).cast("B")
