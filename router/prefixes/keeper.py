"""The pins this Router keeps: as many copies as were wanted, until their time is over.

    establish ──> held on `copies` replicas ──┬── its time is over, or somebody gave it back ──> forgotten
    adopt ────────────^        ^              ├── nobody could: its owner is gone ───────────────^
                               │              ├── another Router keeps it now ───────────────────^
                               └─ made again <┴── a replica died or drains

Replicas hold by leases of their own, so a pin outlives the Router it came through, and another one adopts it
then (`succession.py`). What is listed comes from the replicas (`holdings.py`), and on which of them a copy is
made is not decided here (`copy_maker.py`). A copy that vanishes from a replica which lives on was given back,
through whichever Router: then all of them are. Nor is it for how long what was given back is remembered
(`tombstones.py`).
Knows prefixes, replicas and clocks; knows neither keys nor HTTP. Owner: the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from cache.types import PinId, ReplicaId
from router.errors import PrefixNotFound
from router.placement.routing import Routing
from router.prefixes.copies import Copies
from router.prefixes.copy_maker import TIMEOUT_S, CopyMaker
from router.prefixes.holdings import Engines, holdings, holds
from router.prefixes.kept_pin import RETRY_S, KeptCopy, KeptPin
from router.prefixes.own_tasks import OwnTasks
from router.prefixes.prefix import NOBODY, PinnedPrefix, Prefix, Turn
from router.prefixes.tombstones import FORGET_S, GivenBack, Tombstones

LOOK_INTERVAL_S = 0.5  # engines report as often
# A copy whose replica has sent so many reports without a word of it was given back before it was ever told.
MAX_UNTOLD_REPORTS = 8
HAND_ON_LIMIT_S = 2.0  # a Router that leaves has streams to end, too

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeeperStatistics:
    """Since the start, but for `num_kept`."""

    num_kept: int  # pins that this Router makes lost copies of again
    num_copies_made: int
    num_copies_restored: int  # of those, made because one was lost
    num_refused: int  # pins that did not fit
    num_adopted: int  # pins of Routers that are gone


class PrefixKeeper:
    """`aclose` once done; what is held stays held until its time is over."""

    def __init__(
        self,
        routing: Routing,
        copies: Copies,
        engines: Callable[[], Engines],
        *,
        name: str,
        turn_of: Callable[[str], Turn | None],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        timeout_s: float | None = None,
        max_seconds: float,
    ) -> None:
        """engines: the replicas known here with their latest reports. timeout_s: of one copy. max_seconds:
        that anything is held for. name: this Router's, of this life of its process. turn_of: an owner's,
        None: there is no such owner any more."""
        self.name = name
        self._routing = routing
        self._copies = copies
        self._engines = engines
        self._turn_of = turn_of
        self._clock = clock
        self._wall_clock = wall_clock
        self._tasks = OwnTasks()
        self._maker = CopyMaker(
            routing,
            copies,
            engines,
            self._tasks,
            keeper=name,
            turn_of=turn_of,
            clock=clock,
            wall_clock=wall_clock,
            timeout_s=timeout_s,
        )
        self._pins: dict[PinId, KeptPin] = {}
        self._timeout_s = timeout_s or TIMEOUT_S
        self._max_seconds = max_seconds
        self._tombstones = Tombstones(clock)
        self._watching: asyncio.Task[None] | None = None
        self._is_closed = False
        self._num_restored = self._num_adopted = 0

    # --- questions ----------------------------------------------------------------------------

    def pins(self, owner: str | None = None) -> list[PinnedPrefix]:
        """All there are, or one owner's, oldest first: what replicas hold and what is being made here."""
        found = [pin for pin_id, pin in self._held().items() if pin_id not in self._tombstones]
        ordered = sorted(found, key=lambda pin: (pin.created_at, pin.pin_id))
        return [pin for pin in ordered if owner is None or pin.owner == owner]

    def find(self, pin_id: str, owner: str) -> PinnedPrefix | None:
        return next((pin for pin in self.pins(owner) if pin.pin_id == pin_id), None)

    def kept(self) -> list[PinnedPrefix]:
        """Those that this Router keeps, also where no replica tells of them: as `pins` has them."""
        held = self._held()
        return [held[pin_id] for pin_id in self._pins]

    def is_given_back(self, pin_id: PinId) -> bool:
        """Whether it was, as far as this Router remembers: it is not told, whoever tells of it."""
        return pin_id in self._tombstones

    def given_back(self) -> GivenBack:
        """What was, and may be told of yet: a replica that may hold a copy has not been heard of since, or
        may come to hold one."""
        return self._tombstones.lasting()

    def statistics(self) -> KeeperStatistics:
        return KeeperStatistics(
            len(self._pins),
            self._maker.num_made,
            self._num_restored,
            self._maker.num_refused,
            self._num_adopted,
        )

    def keeps(self, pin_id: PinId) -> bool:
        """Whether this Router makes lost copies of it again."""
        return pin_id in self._pins

    # --- acts ---------------------------------------------------------------------------------

    async def establish(
        self, prefix: Prefix, *, owner: str, copies: int, seconds: float, request_id: str
    ) -> tuple[PinnedPrefix, int]:
        """Have it computed and held on so many replicas; how it is then, and tokens that were cached already.

        All or nothing. Its time begins now, and counts while it is computed. copies: at most the replicas.
        Raises PrefixDoesNotFit with both numbers, PrefixCachingOff, a RoutingError or a RequestRefused;
        PrefixNotFound if somebody gave it back, or its owner went, before it was whole.
        """
        now = self._wall_clock()
        pin_id = PinId(f"prefix-{secrets.token_hex(12)}")
        pin = self._pins[pin_id] = KeptPin(pin_id, owner, prefix, copies, now, now + seconds)
        self._watch()
        try:
            await self._maker.hear_of_all()
            cached_tokens = await self._maker.fill(pin, request_id)
            if pin_id not in self._pins:  # given back before it was there
                raise PrefixNotFound
        except BaseException:
            self._drop(pin)
            raise
        pin.is_established = True
        return pin.told(self.name), cached_tokens

    def adopt(self, told: PinnedPrefix, prefix: Prefix) -> bool:
        """Keep what another Router kept; its holders have been told. Whether it is kept: what was given back
        meanwhile, here or through another Router, is not."""
        if told.pin_id in self._pins or told.pin_id in self._tombstones:
            return False
        engines = self._engines()
        pin = KeptPin(told.pin_id, told.owner, prefix, told.copies, told.created_at, told.expires_at)
        for replica_id in told.replicas:
            report = engines[replica_id].report if replica_id in engines else None
            if report is not None and holds(report, told.pin_id):
                pin.held[replica_id] = KeptCopy(report.number, report.epoch)
        if not pin.held:
            return False
        pin.is_established, pin.formerly = True, told.keeper
        self._pins[told.pin_id] = pin
        self._num_adopted += 1
        self._watch()
        return True

    async def give_back(self, pin: PinnedPrefix) -> None:
        """End it on every replica, whichever Router it came through."""
        ends = self._give_back(pin.pin_id, pin)
        # Not cancelled with whoever asked: what is left of it would be taken for a dead Router's, and kept.
        await asyncio.shield(asyncio.gather(*ends))

    def hear_given_back(self, pin_id: PinId) -> bool:
        """Another Router was told to; it ends the copies that it knows, this one those of a pin that it kept.
        Whether it did."""
        is_kept = pin_id in self._pins
        self._give_back(pin_id)
        return is_kept

    def hear_handed_on(self, given_back: GivenBack) -> None:
        """Another Router leaves: what it remembers is remembered here, for as long."""
        for pin_id in [pin_id for pin_id in self._pins if pin_id in given_back.seconds]:
            self._give_back(pin_id)
        self._tombstones.add_all(given_back, self._engines())
        self._watch()

    def remember_given_back(self, pin: PinnedPrefix) -> None:
        """Whoever keeps it has not heard of it: until its time is over, a copy that is told of ends."""
        self._bury(pin.pin_id, pin.replicas, least_s=self._left_s(pin), most_s=self._left_s(pin))

    async def hand_on(self) -> None:
        """Keep nothing any more, and let the holders say so: another Router need not miss this one first.

        Those that cannot be told in time are found as a dead Router's are.
        """
        pins = [pin for pin in self._pins.values() if pin.is_established]
        for pin in pins:
            self._hand_on(pin)
        try:
            async with asyncio.timeout(HAND_ON_LIMIT_S):
                for pin in pins:
                    # Last the one that heirs ask first: by then they may ask the others, too.
                    for replica_id in sorted(pin.held, reverse=True):
                        await self._copies.inherit(pin.pin_id, replica_id, keeper=self.name, heir=NOBODY)
        except TimeoutError:
            logger.warning("not all holders of prefixes were told that this Router leaves")

    async def aclose(self) -> None:
        """Keep nothing any more. Idempotent."""
        for pin in self._pins.values():
            pin.is_handed_on = pin.is_established  # to whichever Router adopts it
        self._pins.clear()
        self._watching, self._is_closed = None, True
        await self._tasks.aclose()

    # --- keeping them -------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._watching is None and not self._is_closed:
            self._watching = self._tasks.start(self._keep())

    async def _keep(self) -> None:
        while self._pins or self._tombstones:
            await asyncio.sleep(LOOK_INTERVAL_S)
            try:
                self.look()
            except Exception as error:
                # It is about leases: whatever is wrong with one look, the next one finds again.
                logger.error("looking after pins failed", extra={"error_type": type(error).__name__})
        self._watching = None

    def look(self) -> None:
        """What has become of every pin since the last look."""
        engines = self._engines()
        leaving = {each.replica_id for each in self._routing.fleet_statistics().replicas if each.is_draining}
        told = holdings(engines)
        for late in self._tombstones.look(told, engines):
            self._tasks.start(self._copies.end(*late))
        for pin in [pin for pin in self._pins.values() if pin.is_established]:
            self._look_after(pin, told.get(pin.pin_id), leaving, engines)

    def _look_after(
        self, pin: KeptPin, told: PinnedPrefix | None, leaving: Collection[ReplicaId], engines: Engines
    ) -> None:
        """told: by the replicas; None: none tells of it."""
        if told is not None and not self._is_still_ours(pin, told.keeper):
            self._hand_on(pin)
            return
        if self._is_over(pin, engines):
            self._drop(pin)
            return
        for replica_id in [name for name in pin.held if name not in engines or name in leaving]:
            del pin.held[replica_id]
        if pin.work is not None:  # it is being made whole
            return
        if told is not None:
            self._count_strangers(pin, told.replicas, leaving, engines)
        if len(pin.held) < pin.copies and self._clock() >= pin.retry_at:
            pin.work = self._tasks.start(self._restore(pin))

    def _is_over(self, pin: KeptPin, engines: Engines) -> bool:
        if self._turn_of(pin.owner) is None:
            logger.info("a held prefix ended with its key", extra={"pin_id": pin.pin_id})
            return True
        return self._wall_clock() >= pin.expires_at or self._was_given_back(pin, engines)

    def _was_given_back(self, pin: KeptPin, engines: Engines) -> bool:
        """Whether a replica that lives on holds it no more. Copies of engines that are gone are forgotten."""
        for replica_id, copy in list(pin.held.items()):
            report = engines[replica_id].report if replica_id in engines else None
            if report is None:
                continue
            if holds(report, pin.pin_id):
                copy.epoch = report.epoch
            elif copy.epoch is None:
                if pin.work is None and report.number > copy.since_number + MAX_UNTOLD_REPORTS:
                    return True
            elif report.epoch != copy.epoch:
                del pin.held[replica_id]
            else:
                return True
        return False

    async def _restore(self, pin: KeptPin) -> None:
        before = len(pin.held)
        try:
            await self._maker.fill(pin, pin.pin_id)
            pin.retry_s = RETRY_S[0]
        except Exception as error:
            if pin.retry_s == RETRY_S[0]:  # once, however long it lasts
                fields = {"pin_id": pin.pin_id, "copies": len(pin.held), "wanted": pin.copies}
                logger.warning(
                    "a held prefix has fewer copies than wanted",
                    extra={**fields, "error_type": type(error).__name__},
                )
            pin.retry_at = self._clock() + pin.retry_s
            pin.retry_s = min(2 * pin.retry_s, RETRY_S[1])
        finally:
            self._num_restored += max(0, len(pin.held) - before)
            pin.work = None
            if pin.pin_id not in self._pins and not pin.is_handed_on:  # given back in the meantime
                self._end(pin)

    def _give_back(self, pin_id: PinId, told: PinnedPrefix | None = None) -> list[asyncio.Task[None]]:
        """Keep it no more. What ends its copies, on the replicas told of and on those that it was kept on."""
        kept = self._pins.pop(pin_id, None)
        holders = dict.fromkeys(told.replicas if told is not None else ())
        if kept is not None:
            holders |= dict.fromkeys(kept.held)
            if kept.work is not None:
                kept.work.cancel()
        self._note_given_back(pin_id, kept, holders)
        return [self._tasks.start(self._copies.end(pin_id, name)) for name in holders]

    def _drop(self, pin: KeptPin) -> None:
        """Keep it no more, and have the replicas told."""
        self._pins.pop(pin.pin_id, None)
        if pin.work is not None:
            pin.work.cancel()  # its end gives back what it has made
        self._end(pin)

    def _is_still_ours(self, pin: KeptPin, keeper: str) -> bool:
        """By what the first holder says. Before it has heard of an adoption it names the one that is gone."""
        if keeper == self.name:
            pin.formerly = ""
        return keeper in (self.name, pin.formerly)

    def _count_strangers(
        self, pin: KeptPin, holders: Sequence[ReplicaId], leaving: Collection[ReplicaId], engines: Engines
    ) -> None:
        """Copies that others have made, where two Routers took a lost one for theirs to make again: as many
        count as were wanted, the others end."""
        for replica_id in holders:
            report = engines[replica_id].report
            if replica_id in pin.held or replica_id in leaving or replica_id in pin.surplus or report is None:
                continue
            if len(pin.held) < pin.copies:
                pin.held[replica_id] = KeptCopy(report.number, report.epoch)
            else:
                pin.surplus.add(replica_id)
                self._tasks.start(self._copies.end(pin.pin_id, replica_id))

    def _hand_on(self, pin: KeptPin) -> None:
        """Another Router keeps it now, or will: it took this one for gone, or this one leaves."""
        self._pins.pop(pin.pin_id, None)
        pin.is_handed_on = True
        if pin.work is not None:
            pin.work.cancel()

    def _end(self, pin: KeptPin) -> None:
        told = holdings(self._engines()).get(pin.pin_id)  # a replica may hold it whose answer was lost
        holders = dict.fromkeys((*pin.held, *(told.replicas if told is not None else ())))
        if holders or pin.is_established or pin.may_come_late:
            self._note_given_back(pin.pin_id, pin, holders)
        for replica_id in holders:
            self._tasks.start(self._copies.end(pin.pin_id, replica_id))
        pin.held.clear()

    # --- small parts --------------------------------------------------------------------------

    def _held(self) -> dict[PinId, PinnedPrefix]:
        """By the replicas' reports; a copy that was just made here may not have been told yet."""
        engines = self._engines()
        found = holdings(engines)
        for pin_id, pin in self._pins.items():
            made = [name for name, copy in pin.held.items() if copy.is_made and name in engines]
            own = made if pin.is_established else []
            known = found.get(pin_id) or replace(pin.told(self.name), replicas=())
            found[pin_id] = replace(known, replicas=tuple(dict.fromkeys((*known.replicas, *own))))
        return found

    def _note_given_back(self, pin_id: PinId, kept: KeptPin | None, holders: Iterable[ReplicaId]) -> None:
        """kept: None where another Router keeps it. A replica may come to hold a copy as long as making one
        may take: its call was lost, or cancelled a moment after it was given back. That none was asked for
        only the Router knows that kept it."""
        is_whole = kept is not None and kept.is_established and kept.work is None and not kept.may_come_late
        self._bury(
            pin_id,
            holders,
            least_s=FORGET_S if is_whole else self._timeout_s + FORGET_S,
            most_s=self._left_s(kept),
        )

    def _bury(self, pin_id: PinId, holders: Iterable[ReplicaId], *, least_s: float, most_s: float) -> None:
        self._tombstones.add(pin_id, self._engines(), holders, least_s=least_s, most_s=most_s)
        self._watch()

    def _left_s(self, pin: KeptPin | PinnedPrefix | None) -> float:
        """Until no replica holds it any more, whoever is asked: a lease begins when its copy is computed."""
        left_s = self._max_seconds if pin is None else max(0.0, pin.expires_at - self._wall_clock())
        return left_s + self._timeout_s
