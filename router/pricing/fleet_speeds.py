"""The step-time model that each replica is priced by.

    measured itself   the mean of all fits that are as good as its own, or share its machine (`speeds.py`)
    no fit yet        that of the fleet's median, once half of the fleet has one
    slow and idle     that of the fastest, for one request at a time (`trial.py`)

Knows replica names, fits and what requests are like; knows neither queues nor costs.
Owner: the router's event loop; not thread-safe.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from cache.events import StepTimeModel
from cache.types import ReplicaId
from router.pricing.speeds import Speed, is_alike, sound, speeds_of, still_alike_on_one_machine
from router.pricing.trial import Trial

LOOK_S = 1.0  # between two looks at who is alike, unless somebody got its first fit or has changed a lot

MEAN_OVER = 64  # requests, about, that the mean of their work goes back
FIRST_TOKENS = 512.0  # of a request, while there was none


@dataclass(slots=True, eq=False)
class _Replica:
    name: ReplicaId
    machine: str  # see `ReplicaInfo`
    said: StepTimeModel | None = None
    fit: StepTimeModel | None = None  # what it said, if that is sound
    speed: Speed | None = None  # None without a fit
    trial: Trial = field(default_factory=Trial)
    model: StepTimeModel | None = None


class FleetSpeeds:
    """What changes prices returns the replicas whose model is another one now."""

    def __init__(self) -> None:
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._speeds: list[Speed] = []
        self._fastest: Speed | None = None
        self._work = _MeanWork()
        self._machines: dict[ReplicaId, str] = {}  # of those that share theirs
        self._num_sharers: Counter[str] = Counter()  # of each machine that has a name
        self._has_moved = False  # a fit, since the last look
        self._look_at = -math.inf

    def __getitem__(self, replica_id: ReplicaId) -> StepTimeModel | None:
        """None: nobody can tell how fast it is."""
        return self._replicas[replica_id].model

    @property
    def typical(self) -> StepTimeModel | None:
        """Of the fleet's median, of those that have measured themselves; None: nobody has."""
        return self._speeds[0].model if self._speeds else None

    def add(self, replica_id: ReplicaId, machine: str, now: float) -> list[ReplicaId]:
        """It joins, without a fit. machine: as in `ReplicaInfo`. O(replicas * log)."""
        self._replicas[replica_id] = _Replica(replica_id, machine)
        self._count_sharers()
        return self._look(now)

    def remove(self, replica_id: ReplicaId, now: float) -> list[ReplicaId]:
        """O(replicas * log)."""
        del self._replicas[replica_id]
        self._count_sharers()
        return self._look(now)

    def heard(
        self, replica_id: ReplicaId, fit: StepTimeModel | None, *, is_idle: bool, now: float
    ) -> list[ReplicaId]:
        """What it says of its speed; is_idle: it has nothing to do, and nothing is on the way there.

        O(1); O(replicas * log) once in `LOOK_S` while fits move, and when somebody gets a first one.
        """
        replica = self._replicas[replica_id]
        knew = replica.fit is not None
        if fit != replica.said:
            replica.said = fit
            self._note_fit(replica, sound(fit))
        if not is_idle or not self._is_slow(replica):
            replica.trial.busy()
        else:
            replica.trial.idle(now)
        if knew is not (replica.fit is not None) or (self._has_moved and now >= self._look_at):
            return self._look(now)
        return [replica_id] if self._settle(replica) else []

    def sent(self, replica_id: ReplicaId, uncached_tokens: int, cached_tokens: int) -> bool:
        """A request goes there with so much of its prompt to compute; whether its model is another. O(1)."""
        self._work.observe(uncached_tokens, cached_tokens)
        replica = self._replicas[replica_id]
        was_on_trial = replica.trial.is_open
        replica.trial.busy()
        return was_on_trial and self._settle(replica)

    def _note_fit(self, replica: _Replica, fit: StepTimeModel | None) -> None:
        """Who has become another machine is priced as such at once, not at the next look."""
        replica.fit, self._has_moved = fit, True
        if fit is None:
            replica.speed = None
            return
        speed, seconds = replica.speed, self._work.seconds
        times = still_alike_on_one_machine(self._num_sharers[replica.machine])
        if speed is None or not is_alike(seconds(fit), seconds(speed.model), times):
            replica.speed = Speed(fit, frozenset({replica.name}))

    def _count_sharers(self) -> None:
        replicas = self._replicas.values()
        self._num_sharers = Counter([replica.machine for replica in replicas if replica.machine])
        self._machines = {
            replica.name: replica.machine for replica in replicas if self._num_sharers[replica.machine] > 1
        }

    def _is_slow(self, replica: _Replica) -> bool:
        """Others are of a faster speed."""
        return replica.speed is not None and replica.speed is not self._fastest

    def _look(self, now: float) -> list[ReplicaId]:
        """Who is alike now."""
        self._look_at, self._has_moved = now + LOOK_S, False
        typical = self.typical
        replicas, seconds = self._replicas.values(), self._work.seconds
        fits = {replica.name: replica.fit for replica in replicas if replica.fit is not None}
        before = {replica.name: replica.speed for replica in replicas if replica.speed is not None}
        self._speeds = speeds_of(fits, seconds, before, self._machines)
        self._fastest = min(self._speeds, key=lambda speed: seconds(speed.model), default=None)
        for speed in self._speeds:
            for name in speed.members:
                self._replicas[name].speed = speed
        if self._fastest is not None:
            for name in self._fastest.members:
                self._replicas[name].trial = Trial()
        changed = [replica.name for replica in replicas if self._settle(replica)]
        return changed if self.typical == typical else list(self._replicas)

    def _settle(self, replica: _Replica) -> bool:
        """Whether it is to be priced by another model than it was."""
        model = self._model_of(replica)
        has_changed = model != replica.model
        replica.model = model  # the very object that others of its speed have: see `Price`
        return has_changed

    def _model_of(self, replica: _Replica) -> StepTimeModel | None:
        if replica.speed is None:
            return self._typical()
        if replica.trial.is_open and self._fastest is not None:
            return self._fastest.model
        return replica.speed.model

    def _typical(self) -> StepTimeModel | None:
        """For who has no fit. None while those who have are fewer than half.

        One early fit should not speak for a fleet that is still starting; later, a replica that is new, or
        never gets a sound fit, should not keep everybody's cost in tokens.
        """
        num_known = sum([len(speed.members) for speed in self._speeds])
        return self._speeds[0].model if self._speeds and 2 * num_known >= len(self._replicas) else None


class _MeanWork:
    """What a request has to compute, lately. Where fits have seen nothing they may be far apart: they are
    compared on what is asked of them."""

    def __init__(self) -> None:
        self._tokens = FIRST_TOKENS
        self._pairs = FIRST_TOKENS * FIRST_TOKENS / 2.0
        self._num_seen = 0  # up to `MEAN_OVER`

    def observe(self, uncached_tokens: int, cached_tokens: int) -> None:
        self._num_seen = min(self._num_seen + 1, MEAN_OVER)
        pairs = uncached_tokens * (cached_tokens + uncached_tokens / 2.0)
        self._tokens += (uncached_tokens - self._tokens) / self._num_seen
        self._pairs += (pairs - self._pairs) / self._num_seen

    def seconds(self, fit: StepTimeModel) -> float:
        """That work, in one step."""
        return fit.step_s(round(self._tokens), self._pairs, 1)
