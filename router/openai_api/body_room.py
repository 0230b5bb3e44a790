"""Room for large bodies: how many of their bytes a Router holds, and works on, at one time.

    arrives ──> held ──(its tenant's turn)──> worked on: parsed, checked, tokenized ──> placed, or refused

Ids become ten times as many bytes where they are parsed, and text a hundred times where it is tokenized, so
little is worked on at a time, and the others wait as they came. What is held has a bound of its own; small
bodies are counted, and let in all the same: a proxy has connections for a few thousand. Where tenants are
told apart none has more than is left free beside it: half of the room the first, half of the rest the next.
Knows bytes and tenants' names; knows neither HTTP nor fields. Owner: the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from router.errors import BodiesBusy

SMALL_BYTES = 64 << 10  # bodies up to this wait for nobody, and nobody for them


class BodyRoom:
    """One Router's."""

    def __init__(
        self,
        max_held_bytes: int,
        max_worked_bytes: int,
        max_wait_s: float | None,
        *,
        is_divided: bool = False,
    ) -> None:
        """max_held_bytes: of all bodies that are here and not yet placed. max_worked_bytes: of large ones
        that are worked on; a larger one is worked on alone. max_wait_s: for its turn; None = no bound.
        is_divided: a tenant has a second large body here only while its bodies leave as much free as they
        take; else the room is everybody's."""
        self._max_held_bytes = max_held_bytes
        self._is_divided = is_divided
        self._max_worked_bytes = max_worked_bytes
        self._max_wait_s = max_wait_s
        self._held_bytes = self._worked_bytes = 0
        self._held_by = Counter[str]()  # tenants' bytes; none without any
        self._lines: OrderedDict[str, deque[_Waiting]] = OrderedDict()  # whose turn is next first; none empty

    @property
    def held_bytes(self) -> int:
        """Of all bodies that are here."""
        return self._held_bytes

    @contextmanager
    def place(self, tenant: str) -> Iterator[BodyPlace]:
        """One body's place, from its first byte on; it has left at the end."""
        place = BodyPlace(self, tenant)
        try:
            yield place
        finally:
            place.leave()

    def _grow(self, place: BodyPlace, num_bytes: int) -> None:
        self._hold(place, num_bytes)
        if place.num_bytes > SMALL_BYTES and not self._has_room_for(place):
            raise BodiesBusy

    def _has_room_for(self, place: BodyPlace) -> bool:
        """With it counted already."""
        free, own = self._max_held_bytes - self._held_bytes, self._held_by[place.tenant]
        is_alone = own == place.num_bytes  # so that one of the largest size has room, whatever that is
        return free >= (own if self._is_divided and not is_alone else 0)

    def _hold(self, place: BodyPlace, num_bytes: int) -> None:
        """So many more; fewer, if negative."""
        self._held_bytes += num_bytes
        place.num_bytes += num_bytes
        self._held_by[place.tenant] += num_bytes
        if not self._held_by[place.tenant]:
            del self._held_by[place.tenant]

    async def _turn(self, place: BodyPlace) -> None:
        if place.num_bytes <= SMALL_BYTES:
            return
        waiting = _Waiting(place)
        self._lines.setdefault(place.tenant, deque()).append(waiting)
        self._let_in()
        try:
            # Not `wait_for`: Python 3.11's loses a cancellation in the turn of the loop that ends the wait.
            async with asyncio.timeout(self._max_wait_s):
                await waiting.begun
        except TimeoutError:
            raise BodiesBusy from None
        finally:
            if not place.is_working:
                self._forget(waiting)

    def _leave(self, place: BodyPlace) -> None:
        if place.is_working:
            self._worked_bytes -= place.num_bytes
        place.is_working = False
        self._hold(place, -place.num_bytes)
        self._let_in()

    def _let_in(self) -> None:
        """Whoever is next, in turns of tenants, while there is room for them."""
        while self._lines:
            tenant, line = next(iter(self._lines.items()))
            place = line[0].place
            if self._worked_bytes and self._worked_bytes + place.num_bytes > self._max_worked_bytes:
                return
            self._worked_bytes += place.num_bytes
            place.is_working = True
            if not line[0].begun.done():
                line[0].begun.set_result(None)
            line.popleft()
            self._lines.move_to_end(tenant)
            if not line:
                del self._lines[tenant]

    def _forget(self, waiting: _Waiting) -> None:
        """It waits no more, and had no turn."""
        line = self._lines[waiting.place.tenant]
        line.remove(waiting)
        if not line:
            del self._lines[waiting.place.tenant]
        self._let_in()


class BodyPlace:
    """What one request's body takes."""

    def __init__(self, room: BodyRoom, tenant: str) -> None:
        self._room = room
        self.tenant = tenant
        self.num_bytes = 0
        self.is_working = False

    def grow(self, num_bytes: int) -> None:
        """So many bytes more of it are here. Raises BodiesBusy where large bodies have no more room."""
        self._room._grow(self, num_bytes)

    async def turn(self) -> None:
        """Wait until it may be worked on. Raises BodiesBusy if that is not in time."""
        await self._room._turn(self)

    def leave(self) -> None:
        """It is placed, or over. Idempotent."""
        self._room._leave(self)


class _Waiting:
    """A body that is whole."""

    __slots__ = ("begun", "place")

    def __init__(self, place: BodyPlace) -> None:
        self.place = place
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
