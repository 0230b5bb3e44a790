"""Every pin, whichever Router is asked: what replicas tell, and what other Routers keep that none tells.

    asked for one ──> told by a replica, or kept here ──────────────> found
                         └── neither ──> all other Routers are asked ──> found
    asked for all ─────────────────────> all other Routers are asked ──> listed, counted against limits
    given back ──> its copies end, and all other Routers hear of it: who keeps it makes none again

While a pin has no living copy, or its first is computed, nobody but its keeper knows it. Where somebody has
not answered in time, what is not found is not said to be nowhere (`RouterUnheard`). A pin given back whose
keeper has not heard of it is remembered here until its time is over: a copy that is told of by then ends, and
with it the keeper's charge (`keeper.py`). A Router that leaves tells all others at once what it remembers.
Knows pins and Routers' answers; knows neither HTTP nor Serve. Owner: the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from cache.errors import WireError
from cache.types import PinId
from router.errors import PrefixNotFound, RouterUnheard
from router.fleet.rounds import Rounds
from router.prefixes.keeper import PrefixKeeper
from router.prefixes.kept_report import decode_kept, encode_kept
from router.prefixes.own_tasks import OwnTasks
from router.prefixes.prefix import PinnedPrefix
from router.prefixes.tombstones import GivenBack

GLANCE_S = 10.0  # what was heard earlier may long be over
ANSWER_TIMEOUT_S = 2.0  # a Router answers within milliseconds; one that is hung holds nobody up for longer

logger = logging.getLogger(__name__)


class OtherRouters(Protocol):
    """Those of this application. Who asks may be among those asked. None raises anything."""

    async def kept_prefixes(self, asker: str, timeout_s: float) -> list[bytes | None]:
        """What each says to `PrefixDirectory.answer(asker)`; None of each that does not say it in time."""

    async def prefix_given_back(self, asker: str, pin_id: PinId, timeout_s: float) -> list[bool]:
        """What each says to `PrefixDirectory.hear_given_back(asker, pin_id)`, if it does so in time."""

    async def prefixes_handed_on(self, asker: str, given_back: GivenBack, timeout_s: float) -> bool:
        """Whether there are some, and each has done `PrefixDirectory.hear_handed_on(asker, given_back)` in
        time."""


class NoOtherRouters:
    """A Router that knows of no other."""

    async def kept_prefixes(self, asker: str, timeout_s: float) -> list[bytes | None]:
        return []

    async def prefix_given_back(self, asker: str, pin_id: PinId, timeout_s: float) -> list[bool]:
        return []

    async def prefixes_handed_on(self, asker: str, given_back: GivenBack, timeout_s: float) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _Heard:
    """What other Routers keep."""

    pins: dict[PinId, PinnedPrefix]
    is_complete: bool  # all of them have said so


class PrefixDirectory:
    """`aclose` once done."""

    def __init__(self, keeper: PrefixKeeper) -> None:
        self.others: OtherRouters = NoOtherRouters()
        self._keeper = keeper
        self._rounds = Rounds(self._ask, "ask for prefixes")
        self._tasks = OwnTasks()
        self._heard = _Heard({}, is_complete=False)  # last
        self._heard_at = -math.inf  # by the event loop's clock

    # --- for clients --------------------------------------------------------------------------

    async def pins(self, owner: str) -> list[PinnedPrefix]:
        """One owner's, oldest first, without those that only a Router keeps which does not answer.

        What is kept here is as of the moment in which this returns.
        """
        heard = await self._rounds.next()
        told = [pin for pin in heard.pins.values() if pin.owner == owner]
        return self._with(told, self._keeper.pins(owner))

    def at_a_glance(self) -> list[PinnedPrefix]:
        """Everybody's, oldest first, without waiting: what other Routers keep is what they said lately.

        They are asked again by each call, for those that come after it.
        """
        self._tasks.start(self._rounds.next())
        is_old = asyncio.get_running_loop().time() > self._heard_at + GLANCE_S
        return self._with(() if is_old else self._heard.pins.values(), self._keeper.pins())

    def _with(self, told: Iterable[PinnedPrefix], known: Iterable[PinnedPrefix]) -> list[PinnedPrefix]:
        """told: by other Routers. known: here."""
        found = {pin.pin_id: pin for pin in known}
        for pin in told:
            if not self._keeper.is_given_back(pin.pin_id):
                here = found.get(pin.pin_id, pin)
                # Its keeper may know of a copy before its replica's report is here, or the other way round.
                replicas = tuple(dict.fromkeys((*here.replicas, *pin.replicas)))
                found[pin.pin_id] = replace(here, replicas=replicas)
        return sorted(found.values(), key=lambda pin: (pin.created_at, pin.pin_id))

    async def find(self, pin_id: str, owner: str) -> PinnedPrefix:
        """Raises PrefixNotFound; RouterUnheard where a Router that may keep it does not answer."""
        if (pin := self._keeper.find(pin_id, owner)) is not None:
            return pin
        if self._keeper.is_given_back(PinId(pin_id)):
            raise PrefixNotFound
        heard = await self._rounds.next()
        kept = heard.pins.get(PinId(pin_id))
        if kept is not None and kept.owner == owner and not self._keeper.is_given_back(kept.pin_id):
            return kept
        # By now a replica may have told of it, and its keeper have left.
        if (pin := self._keeper.find(pin_id, owner)) is not None:
            return pin
        if kept is None and not heard.is_complete:
            raise RouterUnheard
        raise PrefixNotFound

    async def give_back(self, pin: PinnedPrefix) -> None:
        """End it on every replica, and have whichever Router keeps it make no copy again."""
        # Not cancelled with whoever asked: a Router that did not hear of it would make it again.
        await asyncio.shield(self._tasks.start(self._give_back(pin)))

    async def _give_back(self, pin: PinnedPrefix) -> None:
        is_ours = self._keeper.keeps(pin.pin_id)
        _, heard = await asyncio.gather(
            self._keeper.give_back(pin),
            self.others.prefix_given_back(self._keeper.name, pin.pin_id, ANSWER_TIMEOUT_S),
        )
        if not is_ours and not any(heard):
            self._keeper.remember_given_back(pin)

    async def hand_on(self) -> None:
        """This Router leaves: those that stay, or have come since, remember what was given back and may yet
        be told of."""
        given_back = self._keeper.given_back()
        if not given_back.seconds:
            return
        name = self._keeper.name
        if not await self.others.prefixes_handed_on(name, given_back, ANSWER_TIMEOUT_S):
            logger.warning(
                "not every router was told what was given back as this one leaves: a prefix may come back "
                "if a replica that could not be asked holds it",
                extra={"num_given_back": len(given_back.seconds)},
            )

    async def aclose(self) -> None:
        """Idempotent."""
        await self._rounds.aclose()
        await self._tasks.aclose()

    # --- for other Routers --------------------------------------------------------------------

    def answer(self, asker: str) -> bytes:
        """What this Router keeps: b"" if it asks itself. Raises WireError if it is too much."""
        return b"" if asker == self._keeper.name else encode_kept(self._keeper.name, self._keeper.kept())

    def hear_given_back(self, asker: str, pin_id: PinId) -> bool:
        """It was given back through the Router that says so. Whether this one kept it, and does no more."""
        return asker != self._keeper.name and self._keeper.hear_given_back(pin_id)

    def hear_handed_on(self, asker: str, given_back: GivenBack) -> None:
        """The Router that says so leaves."""
        if asker != self._keeper.name:
            self._keeper.hear_handed_on(given_back)

    async def _ask(self) -> _Heard:
        answers = await self.others.kept_prefixes(self._keeper.name, ANSWER_TIMEOUT_S)
        pins, is_complete = dict[PinId, PinnedPrefix](), None not in answers
        for wire in answers:
            if not wire:
                continue  # our own, or none
            try:
                pins |= {pin.pin_id: pin for pin in decode_kept(wire)}
            except WireError as error:
                # A Router of another version, for the moment of a rolling update.
                logger.warning("a router's prefixes cannot be read", extra={"detail": str(error)})
                is_complete = False
        self._heard, self._heard_at = _Heard(pins, is_complete), asyncio.get_running_loop().time()
        return self._heard
