"""Who keeps requests waiting longer than was expected, and is therefore expected to go on doing so.

A Router that stood still itself, for a collection of garbage or because its machine did, has read nothing
meanwhile: the first token that it misses may be in the next thing it reads, or in the one after that. So
nobody is later than it was when anything was heard last, from whomever: an idle one says something every half
second. And what is heard counts once there was time to read what came with it (`Hearing`).

Knows replicas' names and loads; knows neither hashes nor costs. Owner: the router's event loop.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from cache.types import ReplicaId, RequestId
from router.pricing.fleet_load import FleetLoad
from router.pricing.lateness import Lateness

# Between two lines of the log about one replica: in overload some are late and not late many times a second.
TELL_INTERVAL_S = 10.0

LOOK_S = 0.1  # between two looks at everybody

# In which a Router that runs reads whatever lies in its sockets: many turns of its event loop.
READING_S = 0.05

logger = logging.getLogger(__name__)


class Hearing:
    """Until when a Router has heard everybody who had something to say."""

    def __init__(self) -> None:
        self._before = -math.inf  # the last thing heard before those of now
        self._first = -math.inf  # of those of now, which came within `READING_S`
        self._last = -math.inf

    def heard(self, now: float) -> None:
        """Somebody has said something. O(1)."""
        if now >= self._first + READING_S:
            self._before, self._first = self._last, now
        self._last = now

    def until(self, now: float) -> float:
        """What came earlier has been read. O(1)."""
        return self._last if now >= self._first + READING_S else self._before


class LateReplicas:
    """Holds `Lateness` against the fleet: who is late is priced with the wait that its requests have had."""

    def __init__(self, loads: FleetLoad, clock: Callable[[], float]) -> None:
        self._loads = loads
        self._clock = clock
        self._lateness = Lateness()
        self._late: set[ReplicaId] = set()  # whose backlog is what their requests have waited
        self._told_at: dict[ReplicaId, float] = {}
        self._hearing = Hearing()  # of any of them
        self._look_at = -math.inf  # when it is worth looking again

    def heard(self) -> None:
        """A replica has said something."""
        self._hearing.heard(self._clock())

    def sent(
        self, request_id: RequestId, replica_id: ReplicaId, expected_s: float | None, own_s: float
    ) -> None:
        """expected_s: until its first token; None while speeds are unknown. own_s: as `Lateness` has it."""
        if expected_s is None:
            self._lateness.over(request_id)
        else:
            self._lateness.sent(request_id, replica_id, self._clock(), expected_s, own_s)

    def moved(self, request_id: RequestId, replica_id: ReplicaId) -> None:
        """It is there instead."""
        self._lateness.moved(request_id, replica_id, self._clock())

    def answered(self, request_id: RequestId) -> None:
        """It has its first token. Idempotent."""
        self.heard()
        if self._lateness.answered(request_id) in self._late:
            self._look()

    def ended(self, request_id: RequestId) -> None:
        """It is over, and may never have had one. Idempotent."""
        if self._lateness.over(request_id) in self._late:
            self._look()

    def gone(self, replica_id: ReplicaId) -> None:
        """It has left, whatever becomes of what it has."""
        self._lateness.gone(replica_id)
        self._late.discard(replica_id)
        self._told_at.pop(replica_id, None)

    def look(self) -> None:
        """Look at everybody, if the last look is some time ago."""
        if self._clock() >= self._look_at:
            self._look()

    def _look(self) -> None:
        now = self._clock()
        self._look_at = now + LOOK_S
        late = self._lateness.late(self._hearing.until(now), len(self._loads))
        for replica_id in self._late - late.keys():
            self._loads.delay(replica_id, now)
        for replica_id, late_s in late.items():
            if replica_id not in self._late:
                self._tell(replica_id, late_s, now)
            self._loads.delay(replica_id, now + late_s)
        self._late = set(late)

    def _tell(self, replica_id: ReplicaId, late_s: float, now: float) -> None:
        if now >= self._told_at.get(replica_id, -math.inf) + TELL_INTERVAL_S:
            self._told_at[replica_id] = now
            extra = {"replica_id": replica_id, "late_s": round(late_s, 3)}
            logger.info("replica is late, expecting it to stay so", extra=extra)
