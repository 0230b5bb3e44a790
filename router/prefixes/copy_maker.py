"""A pin's missing copies, made: on which replicas, and what is said where they cannot be.

    missing ──> who may hold one ──> the cheapest that have room, all at once ──> held
                       ^                                                └── refused, lost ──┐
                       └──────────────── the others that have not been asked <──────────────┘

Knows prefixes, replicas and what these have told; knows neither how long a pin is kept nor how it ends.
Owner: the router's event loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence

from cache.engine_report import EngineReport
from cache.errors import PinsFull, ServingError
from cache.messages import PinLease
from cache.types import ReplicaId, RequestId
from router.errors import NoReplica, PrefixCachingOff, PrefixDoesNotFit, PrefixNotFound
from router.placement.routing import Routing
from router.prefixes.copies import NOTHING_LEFT, Copies
from router.prefixes.holdings import Engines, room, roomiest
from router.prefixes.kept_pin import KeptCopy, KeptPin
from router.prefixes.own_tasks import OwnTasks
from router.prefixes.prefix import Turn

TIMEOUT_S = 300.0  # of one copy, where requests have no limit of their own
FIRST_REPORT_S = 2.0  # a replica that just came has told nothing yet: waited for so long


class CopyMaker:
    """One keeper's. What it makes is in the pin's `held`."""

    def __init__(
        self,
        routing: Routing,
        copies: Copies,
        engines: Callable[[], Engines],
        tasks: OwnTasks,
        *,
        keeper: str,
        turn_of: Callable[[str], Turn | None],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        timeout_s: float | None = None,
    ) -> None:
        """engines: the replicas known here with their latest reports. tasks: of copies on their way.
        keeper: this Router's name, in leases. turn_of: an owner's, None: there is no such owner any more.
        timeout_s: of one copy."""
        self._routing = routing
        self._copies = copies
        self._engines = engines
        self._tasks = tasks
        self._keeper = keeper
        self._turn_of = turn_of
        self._clock = clock
        self._wall_clock = wall_clock
        self._timeout_s = timeout_s or TIMEOUT_S
        self.num_made = 0  # copies, since the start
        self.num_refused = 0  # pins that did not fit

    async def hear_of_all(self) -> None:
        """Wait until every replica has reported, or long enough."""
        deadline, replicas = self._clock() + FIRST_REPORT_S, self._routing.replicas
        while any(self._report_of(name) is None for name in replicas):
            if self._clock() >= deadline:
                return
            await asyncio.sleep(0.02)  # reports are looked at, nobody is told of them

    async def fill(self, pin: KeptPin, request_id: str) -> int:
        """Make the copies that are missing; tokens of them that were cached already.

        Raises what the last replica said that could have taken one, or why there is none; PrefixNotFound if
        its owner is gone.
        """
        if (turn := self._turn_of(pin.owner)) is None:
            raise PrefixNotFound
        cached_tokens, tried, refusals = 0, set(pin.held), list[ServingError]()
        while (missing := pin.copies - len(pin.held)) > 0:
            candidates = self._candidates(pin, tried)
            # All or none when it is asked for; of lost ones, as many as there can be.
            if len(candidates) < (1 if pin.is_established else missing):
                raise self._why_not(pin, refusals, candidates)
            ordered = self._copies.order(pin.prefix, turn, _unique(request_id), candidates)
            chosen = sorted(ordered, key=lambda name: not self._has_room(pin, name))[:missing]
            tried |= set(chosen)
            results = await _all(
                [self._tasks.start(self._make(pin, turn, target, _unique(request_id))) for target in chosen]
            )
            for result in results:
                if isinstance(result, int):
                    cached_tokens += result
                elif isinstance(result, ServingError):
                    refusals.append(result)
                else:
                    raise result
        return cached_tokens

    async def _make(self, pin: KeptPin, turn: Turn, target: ReplicaId, request_id: RequestId) -> int:
        """One copy. Known of as soon as it may be there, so that it is given back if this is cancelled."""
        seconds = pin.expires_at - self._wall_clock()
        lease = PinLease(
            pin.pin_id,
            pin.owner,
            seconds,
            pin.copies,
            pin.created_at,
            pin.expires_at,
            self._keeper,
            pin.prefix.cache_salt,
        )
        report = self._report_of(target)
        pin.held[target] = KeptCopy(report.number if report is not None else 0, is_made=False)
        try:
            cached = await self._copies.make(
                pin.prefix,
                turn,
                lease,
                target,
                request_id,
                min(self._timeout_s, seconds),
                is_again=pin.is_established,
            )
        except Exception as error:  # not a cancellation: what that has left there must be given back
            pin.held.pop(target, None)
            pin.may_come_late |= not isinstance(error, NOTHING_LEFT)
            raise
        self.num_made += 1
        if (copy := pin.held.get(target)) is not None:
            copy.is_made = True
            if (report := self._report_of(target)) is not None:
                copy.since_number = report.number
        return cached

    def _candidates(self, pin: KeptPin, tried: Iterable[ReplicaId]) -> list[ReplicaId]:
        """Replicas that may hold a copy and have not been asked. What is shared with other pins there may
        make it fit where it would not alone, so that is theirs to say."""
        refused = set(tried)
        return [
            replica.replica_id
            for replica in self._routing.fleet_statistics().replicas
            if replica.is_matched
            and not replica.is_draining
            and not replica.is_silent
            and replica.replica_id not in refused
            and (report := self._report_of(replica.replica_id)) is not None
            and report.max_pinned_blocks >= pin.prefix.num_blocks
            and (self._has_room(pin, replica.replica_id) or report.pins)
        ]

    def _has_room(self, pin: KeptPin, replica_id: ReplicaId) -> bool:
        """Whether it fits there even if it shares nothing with other pins."""
        report = self._report_of(replica_id)
        return report is not None and room(report) >= pin.prefix.num_blocks

    def _why_not(
        self, pin: KeptPin, refusals: Sequence[ServingError], candidates: Sequence[ReplicaId]
    ) -> ServingError:
        """What is told where so few candidates are left that not all copies can be made."""
        members = self._routing.replicas
        if not members:
            return NoReplica()
        if not any(info.has_prefix_cache for info in members.values()):
            return PrefixCachingOff()
        full: list[PinsFull] = []
        for refusal in refusals:
            if not isinstance(refusal, PinsFull):
                return refusal
            full.append(refusal)
        return self._no_room(pin, full, candidates)

    def _no_room(
        self, pin: KeptPin, full: Sequence[PinsFull], candidates: Sequence[ReplicaId]
    ) -> ServingError:
        """full: what those said that were asked and had no room."""
        members = self._routing.replicas
        fitting = [*pin.held, *(name for name in candidates if self._has_room(pin, name))]
        roomy = [name for name in members if name not in fitting and self._has_room(pin, name)]
        if not full and len(fitting) + len(roomy) >= pin.copies:
            # There is room, on replicas that leave, are silent, or cannot be read: nobody asked for too much.
            return NoReplica(len(members), len(roomy))
        self.num_refused += not pin.is_established
        if full:
            nearest = max(full, key=lambda error: error.left)
            needed, left = nearest.needed or pin.prefix.num_blocks, nearest.left
        else:
            needed, left = pin.prefix.num_blocks, roomiest(self._engines(), without=set(fitting))
        return PrefixDoesNotFit(needed, left, pin.copies, len(fitting))

    def _report_of(self, replica_id: ReplicaId) -> EngineReport | None:
        view = self._engines().get(replica_id)
        return view.report if view is not None else None


def _unique(request_id: str) -> RequestId:
    return RequestId(f"{request_id}-{secrets.token_hex(4)}")


async def _all(tasks: Sequence[asyncio.Task[int]]) -> list[int | BaseException]:
    """What all of them came to. If this is cancelled, so are they."""
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return [task.exception() or task.result() for task in tasks]
