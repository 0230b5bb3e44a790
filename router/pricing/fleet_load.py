"""Every replica's load, and where each of this router's requests is booked.

Knows replica names, request ids and `ReplicaLoad`; knows neither hashes nor which replica is best.
Owner: the router's event loop; not thread-safe. Time comes in by the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from weakref import WeakValueDictionary

from cache.events import Load
from cache.messages import ReplicaInfo
from cache.types import ReplicaId, RequestId
from router.pricing.evictions import Evictions
from router.pricing.fleet_queue import FleetQueue
from router.pricing.fleet_speeds import FleetSpeeds
from router.pricing.load_view import LoadView
from router.pricing.machines import Machine
from router.pricing.replica_load import ReplicaLoad, Reservation
from router.pricing.replica_state import ReplicaState
from router.pricing.residence import Residence


class FleetLoad:
    """Every replica's load, and where each of this router's requests is booked."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        reservation_ttl_s: float,
        silent_after_s: float,
        eviction_regret: float = 1.0,
        crowding_weight: float = 1.0,
    ) -> None:
        """How much counts in a replica's price of what evictions cost later, and of what others on its
        machine wait for."""
        self._clock = clock
        self._eviction_regret = eviction_regret
        self._crowding_weight = crowding_weight
        self._reservation_ttl_s = reservation_ttl_s
        self._silent_after_s = silent_after_s
        self.residence = Residence()  # told by whoever sees sequences begin and end
        self.evictions = Evictions()  # told by whoever hears of blocks and sees what is asked for
        self._replicas: dict[ReplicaId, ReplicaLoad] = {}
        # Every replica's state when it was last asked for, in order of joining; and who has changed since. A
        # decision changes one of them, and asking 64 again would be a tenth of it.
        self._states: dict[ReplicaId, ReplicaState] = {}
        self._places: dict[ReplicaId, int] = {}  # of those
        self._queue = FleetQueue()  # of those
        self._changed: set[ReplicaLoad] = set()
        self._shut: set[ReplicaId] = set()  # of those states, the ones that are
        # In-flight requests and where they are; the value may be a replica that has gone since.
        self._placed: dict[RequestId, ReplicaLoad] = {}
        self._seen_by: dict[RequestId, ReplicaId] = {}  # in-flight requests an engine has named
        self._num_chosen = 0
        self._expires_at = -math.inf  # no reservation is too old before
        self._speeds = FleetSpeeds()
        # Those that replicas share, by name; one that nobody is on any more is forgotten.
        self._machines: WeakValueDictionary[str, Machine] = WeakValueDictionary()

    def add_replica(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        now = self._clock()
        replica = ReplicaLoad(
            replica_id,
            info,
            now,
            self._silent_after_s,
            self._changed,
            self.residence,
            self._machines.setdefault(info.machine, Machine()) if info.machine else None,
            self._crowding_weight,
        )
        self._replicas[replica_id] = replica
        self.evictions.add(replica_id, info.num_blocks)
        self._note_state(replica.state())
        self._places = {name: place for place, name in enumerate(self._states)}
        self._price(self._speeds.add(replica_id, info.machine, now), now)

    def remove_replica(self, replica_id: ReplicaId) -> None:
        """Its requests stay in flight until they are released or routed elsewhere."""
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            replica.gone()
            self._queue = self._queue.without(self._states.pop(replica_id))
            self._places = {name: place for place, name in enumerate(self._states)}
            self._shut.discard(replica_id)
            self.evictions.remove(replica_id)
            now = self._clock()
            self._price(self._speeds.remove(replica_id, now), now)

    def __len__(self) -> int:
        return len(self._replicas)

    def __contains__(self, replica_id: ReplicaId) -> bool:
        return replica_id in self._replicas

    def __getitem__(self, replica_id: ReplicaId) -> ReplicaLoad:
        return self._replicas[replica_id]

    @property
    def num_in_flight(self) -> int:
        return len(self._placed)

    def report(self, replica_id: ReplicaId, load: Load, *, is_between_steps: bool = False) -> None:
        """A replica's account of itself. Ids it names are booked nowhere any more, whoever took them.

        is_between_steps: it was made as a step began.
        """
        now, replica = self._clock(), self._replicas[replica_id]
        for request_id in load.admitted:
            placed = self._placed.get(request_id)
            if placed is None:
                continue  # another router's, or over already
            self._seen_by[request_id] = replica_id
            if placed is not replica:
                placed.drop(request_id)
        is_idle = not (load.num_running or load.num_waiting or replica.num_in_flight)
        moved = self._speeds.heard(replica_id, load.step_time, is_idle=is_idle, now=now)
        replica.regret = self._eviction_regret * self.evictions.regret_of(replica_id)
        replica.uses_lost = self._eviction_regret * self.evictions.uses_lost(replica_id)
        replica.report(
            load,
            self._speeds[replica_id],
            now,
            self._speeds.typical,
            is_between_steps=is_between_steps,
        )
        self._price([other for other in moved if other != replica_id], now)

    def delay(self, replica_id: ReplicaId, until: float) -> None:
        """It starts nothing new before then, whatever it says. Nothing happens if it has gone."""
        if replica_id in self._replicas:
            self._replicas[replica_id].delay(until)

    def reserve(self, replica_id: ReplicaId, reservation: Reservation) -> None:
        """Book a request on a replica, instead of wherever it was booked before."""
        self.release(reservation.request_id)
        self._num_chosen += 1
        self._replicas[replica_id].choose(self._num_chosen)
        self._book(replica_id, reservation)

    def move(self, replica_id: ReplicaId, reservation: Reservation) -> None:
        """The request went to this replica: book it there, unless its engine has named it already."""
        request_id = reservation.request_id
        placed = self._placed.get(request_id)
        if placed is None or placed.replica_id == replica_id or replica_id not in self._replicas:
            return
        if self._seen_by.get(request_id) == replica_id:
            self._leave(request_id)
            self._enter(request_id, replica_id)
            return
        self.release(request_id)
        self._book(replica_id, reservation)

    def release(self, request_id: RequestId) -> None:
        """The request is over. Idempotent."""
        placed = self._placed.get(request_id)
        if placed is None:
            return
        placed.drop(request_id)
        self._leave(request_id)
        self._seen_by.pop(request_id, None)

    def expire(self) -> int:
        """Drop reservations nobody released in time; how many. They stay in flight.

        O(1) until the oldest reservation there was at the last look may be too old.
        """
        now = self._clock()
        if now <= self._expires_at:
            return 0
        replicas = self._replicas.values()
        dropped = sum([replica.expire(now - self._reservation_ttl_s) for replica in replicas])
        oldest = min([replica.oldest_unseen_at for replica in replicas], default=now)
        self._expires_at = min(oldest, now) + self._reservation_ttl_s
        return dropped

    def view(self, replica_id: ReplicaId) -> LoadView:
        return self._replicas[replica_id].state().view(self._clock())

    def states(self) -> list[ReplicaState]:
        """Every replica, in order of joining. O(replicas that have changed), and a copy of a list."""
        if self._changed:
            for replica in self._changed:
                # One that has left changes still while its requests end, and its name may be another's.
                if self._replicas.get(replica.replica_id) is replica:
                    self._note_state(replica.state())
            self._changed.clear()
        return list(self._states.values())

    def open_states(self) -> list[ReplicaState]:
        """`states` of those that are not shut. O(replicas that have changed), and a copy, if all are open."""
        states = self.states()
        return [state for state in states if not state.is_shut] if self._shut else states

    def places(self) -> Mapping[ReplicaId, int]:
        """Of each in `states`; not to be changed."""
        return self._places

    def queue(self) -> FleetQueue:
        """Of all that `states` told of when it was asked last. O(1)."""
        return self._queue

    def placed(self, request_id: RequestId) -> ReplicaId | None:
        """Where a request is in flight; None if it is not."""
        placed = self._placed.get(request_id)
        return placed.replica_id if placed is not None else None

    def _note_state(self, state: ReplicaState) -> None:
        replica_id = state.replica_id
        before = self._states.get(replica_id)
        if before is not None:
            self._queue = self._queue.without(before)
        self._queue = self._queue.beside(state)
        self._states[replica_id] = state
        (self._shut.add if state.is_shut else self._shut.discard)(replica_id)

    def _book(self, replica_id: ReplicaId, reservation: Reservation) -> None:
        now, replica = self._clock(), self._replicas[replica_id]
        if self._speeds.sent(replica_id, reservation.uncached_tokens, reservation.cached_tokens):
            replica.price_by(self._speeds[replica_id], now, self._speeds.typical)
        replica.reserve(reservation, now)
        self._enter(reservation.request_id, replica_id)

    def _enter(self, request_id: RequestId, replica_id: ReplicaId) -> None:
        replica = self._replicas[replica_id]
        self._placed[request_id] = replica
        replica.enter()

    def _leave(self, request_id: RequestId) -> None:
        self._placed.pop(request_id).leave()

    def _price(self, replica_ids: Iterable[ReplicaId], now: float) -> None:
        """These, or the fleet, are of another speed than before."""
        for replica_id in replica_ids:
            self._replicas[replica_id].price_by(self._speeds[replica_id], now, self._speeds.typical)
