"""What is held, and what is told of it. Plain values."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from cache.block_hash import PackedHashes
from cache.types import PinId, ReplicaId

NOBODY = ""  # as a pin's keeper: its Router has left, and said so


@dataclass(frozen=True, slots=True)
class Prefix:
    """Full blocks of tokens, ready to be sent."""

    token_ids: array[int]  # packed int32; a whole number of blocks
    block_hashes: PackedHashes  # of all of them, parent first
    cache_salt: str = ""

    @property
    def num_blocks(self) -> int:
        return len(self.block_hashes)


@dataclass(frozen=True, slots=True)
class Turn:
    """Whose turn copies are computed in, at Routers and at replicas."""

    tenant: str
    share: float  # beside other tenants'; above 0
    priority: int  # among its tenant's requests


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """One pin as it is at a moment."""

    pin_id: PinId
    owner: str
    num_blocks: int  # of one copy
    copies: int  # wanted
    replicas: Sequence[ReplicaId]  # that hold one now
    created_at: float  # unix seconds
    expires_at: float
    keeper: str  # the Router that makes lost copies again, as the first of its holders tells

    @property
    def is_whole(self) -> bool:
        """Whether there are as many copies as were wanted."""
        return len(self.replicas) >= self.copies
