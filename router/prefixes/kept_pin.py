"""A pin as the Router that keeps it knows it. Knows replicas and times; acts on none of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from cache.types import PinId, ReplicaId
from router.prefixes.prefix import PinnedPrefix, Prefix

RETRY_S = (1.0, 15.0)  # between attempts to make lost copies again: the first pause, and the longest


@dataclass(slots=True)
class KeptCopy:
    """One replica that was made to hold it."""

    since_number: int  # of its reports, the latest when it began to hold
    epoch: int | None = None  # of the engine that told it holds it; None: none has yet
    is_made: bool = True  # False: it is being computed


@dataclass(slots=True, eq=False)
class KeptPin:
    """One that this Router keeps."""

    pin_id: PinId
    owner: str
    prefix: Prefix
    copies: int
    created_at: float  # unix seconds
    expires_at: float
    held: dict[ReplicaId, KeptCopy] = field(default_factory=dict)
    is_established: bool = False
    may_come_late: bool = False  # a replica not among `held` was asked for a copy, and has not refused it
    is_handed_on: bool = False  # to another Router, or left to one: nothing of it is this one's to give back
    surplus: set[ReplicaId] = field(default_factory=set)  # whose copy was one too many, and ended
    formerly: str = ""  # who kept it before, where it was adopted: replicas may name that one a while yet
    work: asyncio.Task[None] | None = None  # making lost copies again
    retry_at: float = 0.0
    retry_s: float = RETRY_S[0]  # the next pause

    def told(self, keeper: str) -> PinnedPrefix:
        return PinnedPrefix(
            self.pin_id,
            self.owner,
            self.prefix.num_blocks,
            self.copies,
            tuple(self.held),
            self.created_at,
            self.expires_at,
            keeper,
        )
