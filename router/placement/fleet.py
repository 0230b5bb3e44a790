"""Which replicas there are, and of which nothing can be said about their caches.

    listed   running, as whoever tells the membership says
    foreign  listed, but of another model, or of a version that cannot be read: never a member
    lost     listed still, but found dead: not a member
    blind    a member whose cache is unknown: its hashes are not ours, or nothing was heard of it for too long

Knows names and what replicas said of themselves once; knows neither blocks nor load.
Owner: the router's event loop.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from cache.fingerprint import Fingerprint
from cache.messages import ReplicaInfo
from cache.types import ReplicaId
from router.pricing.replica_state import ReplicaState

SILENCE_CHECK_S = 0.1  # between two looks for replicas that have fallen silent

logger = logging.getLogger(__name__)


class Fleet:
    """The members. Iterates over their names, in order of joining."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        """fingerprint: of the caches that this router can read."""
        self._fingerprint = fingerprint
        self._members: dict[ReplicaId, ReplicaInfo] = {}
        self._lost: set[ReplicaId] = set()
        self.foreign: frozenset[ReplicaId] = frozenset()
        self._unmatched: frozenset[ReplicaId] = frozenset()
        self._silent: set[ReplicaId] = set()  # already warned about
        self._silence_checked_at = -math.inf
        self.least_model_len = 0  # tokens every member has room for

    def __contains__(self, replica_id: ReplicaId) -> bool:
        return replica_id in self._members

    def __iter__(self) -> Iterator[ReplicaId]:
        return iter(self._members)

    @property
    def members(self) -> Mapping[ReplicaId, ReplicaInfo]:
        return self._members

    # --- membership ---------------------------------------------------------------------------

    def of_our_model(self, listed: Mapping[ReplicaId, ReplicaInfo | None]) -> dict[ReplicaId, ReplicaInfo]:
        """Of these that are running, those that can answer this router's requests.

        While a rolling update changes the model there are others, which would take our token ids for other
        words, and go on with our answers in theirs. None: what it told of itself cannot be read.
        """
        readable = {name: info for name, info in listed.items() if info is not None}
        ours = {n: info for n, info in readable.items() if info.fingerprint.is_same_model(self._fingerprint)}
        foreign = frozenset(listed.keys() - ours.keys())
        for name in (foreign & readable.keys()) - self.foreign:
            logger.warning("replica has another model, it gets no requests", extra={"replica_id": name})
        self.foreign = foreign
        return ours

    def joining(self, listed: Mapping[ReplicaId, ReplicaInfo]) -> dict[ReplicaId, ReplicaInfo]:
        """Those to `add` now that these are running, and no others."""
        self._lost &= listed.keys()
        return {
            name: info for name, info in listed.items() if not (name in self._members or name in self._lost)
        }

    def leaving(self, listed: Mapping[ReplicaId, ReplicaInfo]) -> list[ReplicaId]:
        """Those to `remove` now that these are running, and no others."""
        return [name for name in self._members if name not in listed]

    def lose(self, replica_id: ReplicaId) -> None:
        """It died: not to be added again until the membership has let go of it."""
        self._lost.add(replica_id)

    def add(self, replica_id: ReplicaId, info: ReplicaInfo) -> bool:
        """Whether its blocks can be matched: it keeps prefixes and hashes them as this router does."""
        self._members[replica_id] = info
        self._note_model_len()
        if info.has_prefix_cache and info.fingerprint == self._fingerprint:
            return True
        self._unmatched |= {replica_id}
        if info.has_prefix_cache:  # else it is routed by load alone by its own choice
            logger.warning("fingerprint differs, routing by load alone", extra={"replica_id": replica_id})
        return False

    def remove(self, replica_id: ReplicaId) -> None:
        del self._members[replica_id]
        self._unmatched -= {replica_id}
        self._silent.discard(replica_id)
        self._note_model_len()

    def _note_model_len(self) -> None:
        self.least_model_len = min([i.max_model_len for i in self._members.values()], default=0)

    # --- who is blind -------------------------------------------------------------------------

    @property
    def unmatched(self) -> frozenset[ReplicaId]:
        """Members whose hashes are not this router's, or that keep none."""
        return self._unmatched

    @property
    def silent(self) -> set[ReplicaId]:
        """Members that have said nothing for too long. Empty on a good day."""
        return self._silent

    @property
    def blind(self) -> frozenset[ReplicaId]:
        """Unmatched or silent."""
        return self._unmatched | self._silent if self._silent else self._unmatched

    def note_silences(self, states: Callable[[], Iterable[ReplicaState]], now: float) -> None:
        """One line of the log per replica that falls silent. Looks at most every `SILENCE_CHECK_S`.

        states: of all members, asked for when it looks.
        """
        if now < self._silence_checked_at + SILENCE_CHECK_S:
            return
        self._silence_checked_at = now
        for state in states():
            if now > state.silent_at and state.replica_id not in self._silent:
                self._silent.add(state.replica_id)
                extra = {"replica_id": state.replica_id}
                logger.warning("replica is silent, routing by load alone", extra=extra)

    def heard(self, replica_id: ReplicaId) -> None:
        if replica_id in self._silent:
            self._silent.discard(replica_id)
            logger.info("replica is heard again", extra={"replica_id": replica_id})
