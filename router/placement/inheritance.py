"""Where prefixes go whose replica has just left: one new home for each, whichever Router is asked first.

A hot prefix is asked for by several requests at once, and each of them would be worth a copy of its own: that
is an investment where a copy is in use already, and the same work done several times where there is none. So
for a while after a replica has left, a prefix gets a second home only as cold ones do. And where several
Routers might choose the first home in the same moment, before either has heard of the other's choice, all of
them prefer the same replica: by rendezvous, the one whose name and the prefix's hash together hash highest.

Knows hashes, names and seconds; knows neither load nor cost. Owner: the router's event loop.
Source of rendezvous hashing: Thaler and Ravishankar, A Name-Based Mapping Scheme for Rendezvous, 1996.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from hashlib import blake2b

from cache.types import HashHint, ReplicaId

SETTLES_S = 30.0  # after a replica has left: by then whatever is hot has been asked for
LEAST_COPIES = 2  # meanwhile, copies there must be for one more to be an investment


class Inheritance:
    """Whether a replica has left lately."""

    def __init__(self) -> None:
        self._until = -math.inf

    def replica_left(self, now: float) -> None:
        """What it held has no home any more, or will have none soon."""
        self._until = now + SETTLES_S

    def is_open(self, now: float) -> bool:
        return now < self._until


def heir(prefix: HashHint, replicas: Iterable[ReplicaId]) -> ReplicaId:
    """Who is to hold that prefix: the same everywhere, whatever the order. At least one replica."""
    name = prefix.to_bytes(8, "little")
    return max(replicas, key=lambda each: (blake2b(name + each.encode(), digest_size=8).digest(), each))
