"""Pins that were given back, remembered for as long as a replica may tell of one.

    given back ──> every replica is awaited ──(a later report is without it)──> nobody is ─(5 s*)─> forgotten
                      ^         └──(its time is over: its leases have ended by themselves)────────────^
                      └──(a report has it, however late: that copy is to be ended once more)
    * and as long as a replica may come to hold a copy that it was asked for

A replica that could not be asked holds its copy, and tells of it when it is back. By then that looks like a
pin whose Router is gone, which any Router adopts; only who remembers knows better. A replica that has left is
awaited, too: a list of replicas may lack one for a moment. There are few of those: each replica that is well
has confirmed within half a second. Where there are many all the same, a look costs no more: it sees what is
told, and a part of the others.
Knows pins, reports and times; ends nothing itself. Owner: the router's event loop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cache.types import PinId, ReplicaId
from router.prefixes.holdings import Engines
from router.prefixes.prefix import PinnedPrefix

FORGET_S = 5.0  # what was given back may still be in a report that is on its way
END_AGAIN_S = 2.0  # between two attempts at ending a copy that is told of all the same
# Some 20 MB. So many are given back within the minutes that each is remembered, or never.
MAX_TOMBSTONES = 1 << 16
# Of those that nobody tells of: milliseconds of the event loop. Where there are more, the others' turn comes
# with the next looks, and they are remembered for that much longer: a minute where there are MAX_TOMBSTONES.
MAX_PER_LOOK = 1 << 9

logger = logging.getLogger(__name__)

_Version = tuple[int, int]  # of a report: its engine's epoch, and its number there


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A replica that may hold a copy."""

    version: _Version | None  # of its latest report when that was to be ended; None: there was none
    again_at: float  # not earlier, by the clock, it is to be ended once more


@dataclass(slots=True)
class _Tombstone:
    """Times by the clock."""

    least_until: float  # remembered so long, whatever is told
    most_until: float  # its leases have ended by then: any bound will do, and the first one stays
    awaited: dict[ReplicaId, _Awaited] = field(default_factory=dict)

    @property
    def until(self) -> float:
        return max(self.least_until, self.most_until) if self.awaited else self.least_until


@dataclass(frozen=True, slots=True)
class GivenBack:
    """What a Router that leaves remembers, and the others are to."""

    seconds: dict[PinId, tuple[float, float]]  # from now on: `least_s` and `most_s`, as for `Tombstones.add`
    replicas: tuple[ReplicaId, ...]  # that may hold a copy of one of them


class Tombstones:
    """One Router's. `look` forgets; O(1) to ask for one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_pin: dict[PinId, _Tombstone] = {}  # oldest first
        self._round: deque[PinId] = deque()  # to be looked at before those that have been come again
        self._has_overflowed = False

    def __len__(self) -> int:
        return len(self._by_pin)

    def __contains__(self, pin_id: PinId) -> bool:
        return pin_id in self._by_pin

    def lasting(self) -> GivenBack:
        """Those of which a replica may yet tell: all but what is only to outlast reports on their way."""
        now, seconds, replicas = self._clock(), dict[PinId, tuple[float, float]](), set[ReplicaId]()
        for pin_id, tombstone in self._by_pin.items():
            if tombstone.awaited or tombstone.least_until > now + FORGET_S:
                seconds[pin_id] = (
                    max(0.0, tombstone.least_until - now),
                    max(0.0, tombstone.most_until - now),
                )
                replicas.update(tombstone.awaited)
        return GivenBack(seconds, tuple(sorted(replicas)))

    def add(
        self,
        pin_id: PinId,
        engines: Engines,
        holders: Iterable[ReplicaId] = (),
        *,
        least_s: float,
        most_s: float,
    ) -> None:
        """It was given back, once more perhaps.

        engines: with the reports known now. holders: replicas that may have a copy and are not among them.
        least_s: from now, that it is remembered whatever is told. most_s: until all its leases have ended.
        """
        self.add_all(GivenBack({pin_id: (least_s, most_s)}, tuple(holders)), engines)

    def add_all(self, given_back: GivenBack, engines: Engines) -> None:
        """As `add` does each."""
        now = self._clock()
        awaited = {name: _Awaited(_version(engines, name), now) for name in (*engines, *given_back.replicas)}
        for pin_id, (least_s, most_s) in given_back.seconds.items():
            tombstone = self._by_pin.get(pin_id)
            if tombstone is None:
                self._make_room()
                tombstone = self._by_pin[pin_id] = _Tombstone(now + least_s, now + most_s)
            tombstone.least_until = max(tombstone.least_until, now + least_s)
            tombstone.awaited |= awaited

    def look(self, told: Mapping[PinId, PinnedPrefix], engines: Engines) -> list[tuple[PinId, ReplicaId]]:
        """Forget what nobody can tell of any more; copies to be ended once more.

        told: every pin that a replica tells of, by the same reports. O(told, and whom MAX_PER_LOOK await).
        """
        now = self._clock()
        late = self._late(told, engines, now)
        versions = {name: _version(engines, name) for name in engines}
        if not self._round:
            self._round.extend(self._by_pin)
        for _ in range(min(len(self._round), MAX_PER_LOOK)):
            pin_id = self._round.popleft()
            self._settle(pin_id, told[pin_id].replicas if pin_id in told else (), versions, now)
        return late

    def _late(
        self, told: Mapping[PinId, PinnedPrefix], engines: Engines, now: float
    ) -> list[tuple[PinId, ReplicaId]]:
        late = list[tuple[PinId, ReplicaId]]()
        for pin_id, pin in told.items():
            tombstone = self._by_pin.get(pin_id)
            if tombstone is None:
                continue
            for name in pin.replicas:
                known, version = tombstone.awaited.get(name), _version(engines, name)
                # One that hangs says nothing new, and need not be asked until it does.
                if known is None or (version != known.version and now >= known.again_at):
                    tombstone.awaited[name] = _Awaited(version, now + END_AGAIN_S)
                    late.append((pin_id, name))
        return late

    def _settle(
        self,
        pin_id: PinId,
        holders: Sequence[ReplicaId],
        versions: Mapping[ReplicaId, _Version | None],
        now: float,
    ) -> None:
        """Await no more who has reported since, and holds no copy; forget it if its time is over."""
        tombstone = self._by_pin.get(pin_id)
        if tombstone is None:
            return  # it made room
        if now > tombstone.until:
            del self._by_pin[pin_id]
            return
        if not tombstone.awaited:
            return
        tombstone.awaited = {
            name: awaited
            for name, awaited in tombstone.awaited.items()
            if name in holders or versions.get(name) in (None, awaited.version)
        }
        if not tombstone.awaited:
            tombstone.least_until = max(tombstone.least_until, now + FORGET_S)

    def _make_room(self) -> None:
        if len(self._by_pin) < MAX_TOMBSTONES:
            return
        del self._by_pin[next(iter(self._by_pin))]
        if not self._has_overflowed:  # once: by now it is every one that is given back
            self._has_overflowed = True
            logger.warning(
                "more prefixes were given back than are remembered: one may come back if a replica that "
                "could not be asked holds it",
                extra={"remembered": MAX_TOMBSTONES},
            )


def _version(engines: Engines, name: ReplicaId) -> _Version | None:
    report = engines[name].report if name in engines else None
    return (report.epoch, report.number) if report is not None else None
