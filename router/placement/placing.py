"""How an attempt gets its placement: at once, or when the replica that is best for it is nearly free.

The asyncio side of `held.py`: one future per waiting request, one timer for all of them, and a poll after
whatever may free a replica. Knows futures; decides nothing. Owner: the router's event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Protocol

from cache.errors import DeadlineExceeded
from cache.types import RequestId
from router.config import RouterConfig
from router.errors import AllBusy, NoReplica, RouterLeaves
from router.placement.admission import Admission, QueueState
from router.placement.decision import Placement, RouteQuery
from router.placement.held import HeldRequests
from router.placement.held_request import Departure
from router.placement.hold_options import HoldOptions
from router.placement.routing import Routing


class Placer(Protocol):
    """Finds a replica for an attempt."""

    async def place(self, query: RouteQuery, *, since: float, deadline: float | None) -> Placement:
        """A booked placement. Whoever asked must `release` it, also if it was cancelled: it may just have
        been booked then.

        since: when the request began to wait; deadline: when to give it up; both by the router's clock.
        Raises RoutingError, DeadlineExceeded, or ConfigError for an unknown policy.
        """

    @property
    def num_held(self) -> int:
        """Requests that wait for a replica here."""

    @property
    def held_s(self) -> float:
        """Seconds of replicas' time that they will take together."""

    @property
    def refused_ratio(self) -> float:
        """Of those seconds, how many were refused lately for each that was placed."""

    def queue_state(self) -> QueueState:
        """What a newcomer would wait, and may, now. Changes nothing; O(replicas)."""

    def served(self, tenant: str, num_tokens: int, share: float) -> None:
        """So many tokens were generated for a tenant, of that share: whose turn it is goes by that, too."""

    def not_taken(self, engine_s: float) -> None:
        """An engine has refused what was placed there, since it is full: of so many seconds of its time."""

    def given_up(self, engine_s: float) -> None:
        """Nor is that sent anywhere else: it counts as refused work."""

    def close(self) -> None:
        """Wait for nothing any more: whoever waits hears RouterLeaves. Idempotent."""


def make_placer(config: RouterConfig, routing: Routing, clock: Callable[[], float]) -> Placer:
    """The one `config.binding` names."""
    if config.binding == "late":
        return LatePlacer(routing, HeldRequests(routing, HoldOptions.of(config), clock), clock)
    return PromptPlacer(routing, Admission.of(config, clock), clock)


LOOK_S = 0.1  # so often is looked whether there is room for those who had a replica and lost it


class PromptPlacer:
    """Dispatch at once: requests wait in the engines' queues, no longer than those may be.

    Only who was placed before, and may have begun to be answered, waits here while all of those are full.
    """

    held_s = 0.0

    def __init__(self, routing: Routing, admission: Admission, clock: Callable[[], float]) -> None:
        self._routing = routing
        self._admission = admission
        self._clock = clock
        self._looking: set[asyncio.Future[None]] = set()

    @property
    def num_held(self) -> int:
        return len(self._looking)

    @property
    def refused_ratio(self) -> float:
        return self._admission.refused_ratio

    async def place(self, query: RouteQuery, *, since: float, deadline: float | None) -> Placement:
        while query.is_again:
            try:
                return self._book(query, deadline)
            except AllBusy:
                pass  # room comes as others end
            except NoReplica as error:
                self._routing.note_refused(error)
                raise
            if deadline is not None and deadline <= self._clock():
                raise DeadlineExceeded(deadline - since, self._clock() - since)
            await self._pause()
        return self.place_now(query, deadline=deadline)

    async def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        looking = loop.create_future()
        timer = loop.call_later(LOOK_S, _wake, looking)
        self._looking.add(looking)
        try:
            await looking
        finally:
            timer.cancel()
            self._looking.discard(looking)

    def place_now(self, query: RouteQuery, *, deadline: float | None = None) -> Placement:
        """`place` without waiting."""
        try:
            return self._book(query, deadline)
        except (AllBusy, NoReplica) as error:
            self._routing.note_refused(error)
            raise

    def _book(self, query: RouteQuery, deadline: float | None) -> Placement:
        decision = self._routing.weigh(query)
        if query.is_new:
            wait_s = 0.0 if decision.starts_now else self._routing.wait_s()
            num_waiting = sum([state.num_waiting for state in decision.ranking.states])
            self._admission.came(
                decision.prefill_s,
                num_waiting=num_waiting,
                wait_s=wait_s,
                num_replicas=self._routing.free_replicas(0.0)[0],
                part=query.part,
            )
        if query.has_to_be_admitted and not decision.starts_now:
            self._admission.check(
                wait_s=wait_s,
                ahead_s=min(wait_s, decision.start_s),
                own_s=decision.engine_s,
                deadline=math.inf if deadline is None else deadline,
                num_replicas=len(decision.ranking),
                part=query.part,
            )
        query.admit()
        self._admission.placed(decision.engine_s)
        return self._routing.book(decision)

    def queue_state(self) -> QueueState:
        return self._admission.state(self._routing.wait_s())

    def served(self, tenant: str, num_tokens: int, share: float) -> None:
        """The engines hear of it themselves."""

    def not_taken(self, engine_s: float) -> None:
        self._admission.not_taken(engine_s)

    def given_up(self, engine_s: float) -> None:
        self._admission.given_up(engine_s)

    def close(self) -> None:
        for looking in self._looking:
            _leave(looking)


def _wake(looking: asyncio.Future[None]) -> None:
    if not looking.done():  # else cancelled in this turn of the loop
        looking.set_result(None)


def _leave(waits: asyncio.Future[Any]) -> None:
    """Its client is to hear why: were it cancelled, the server would answer in plain text."""
    if not waits.done():
        waits.set_exception(RouterLeaves())


class LatePlacer:
    """Late binding: requests wait here. Build and use it on the event loop."""

    def __init__(self, routing: Routing, held: HeldRequests, clock: Callable[[], float]) -> None:
        self._held = held
        self._clock = clock
        self._futures: dict[RequestId, asyncio.Future[Placement]] = {}
        self._soon: asyncio.Handle | None = None  # a poll in this turn of the loop
        self._timer: asyncio.TimerHandle | None = None  # a poll when somebody will be free
        routing.watch_load(self._wake)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def held_s(self) -> float:
        return self._held.engine_s

    @property
    def refused_ratio(self) -> float:
        return self._held.refused_ratio

    def queue_state(self) -> QueueState:
        return self._held.queue_state()

    async def place(self, query: RouteQuery, *, since: float, deadline: float | None) -> Placement:
        self._held.submit(query, since=since, deadline=deadline)
        future: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        self._futures[query.request_id] = future
        try:
            self._poll()
            return await future
        finally:  # placed, or its client has gone
            self._futures.pop(query.request_id, None)
            self._held.withdraw(query.request_id)

    def served(self, tenant: str, num_tokens: int, share: float) -> None:
        self._held.served(tenant, num_tokens, share)

    def not_taken(self, engine_s: float) -> None:
        self._held.not_taken(engine_s)

    def given_up(self, engine_s: float) -> None:
        self._held.given_up(engine_s)

    def close(self) -> None:
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()
        self._soon = self._timer = None
        for request_id, future in self._futures.items():
            self._held.withdraw(request_id)
            _leave(future)
        self._futures.clear()

    def _wake(self) -> None:
        """Something has changed. Reports come by the thousand: one poll a turn answers all of them."""
        if self._soon is None and len(self._held):
            self._soon = asyncio.get_running_loop().call_soon(self._poll)

    def _poll(self) -> None:
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()
        self._soon = self._timer = None
        for departure in self._held.poll():
            self._settle(departure)
        poll_at = self._held.next_poll_at()
        if poll_at is not None:
            wait_s = max(0.0, poll_at - self._clock())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._poll)

    def _settle(self, departure: Departure) -> None:
        future = self._futures[departure.request_id]
        if future.done():
            return  # cancelled in this turn of the loop: its caller releases what was booked
        if departure.placement is not None:
            future.set_result(departure.placement)
        else:
            assert departure.error is not None, "a departure is one or the other"
            future.set_exception(departure.error)
