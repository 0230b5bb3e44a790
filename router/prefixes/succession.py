"""Pins whose Router has gone, adopted by another: so a Router's death loses no copy but what dies with it.

    a report names a keeper ──> that one does not answer ──(for so long)──> its holders are asked ──> adopted
                 │                 └── it does again: nothing              ^  └── another was quicker: nothing
                 └──> nobody: its Router has left, and told its holders ───┘

The replicas are the truth here, too: each lease names the Router that keeps it, and a holder lets one heir
take the place of the keeper that it knows. The first holder by name decides among several heirs; from it come
the tokens. A Router that was only slow finds another's name in the reports, and keeps the pin no more.
Knows pins, Routers' names and time; knows neither HTTP nor Serve. Owner: the router's event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from array import array
from collections.abc import Awaitable, Callable, Mapping

from cache.block_hash import PackedHashes
from cache.messages import HeldPrefix
from cache.types import PinId, ReplicaId
from router.prefixes.copies import Copies
from router.prefixes.keeper import PrefixKeeper
from router.prefixes.prefix import NOBODY, PinnedPrefix, Prefix

LOOK_INTERVAL_S = 2.0
# A Router that does not answer for so long is gone: Serve replaces one that stands still within nine seconds.
# Taking a slow one for gone costs nothing but a prompt's ids on their way; two are never kept for one.
GONE_AFTER_S = 10.0

logger = logging.getLogger(__name__)


class Succession:
    """Looks for pins that nobody keeps while there are replicas. `aclose` once done."""

    def __init__(
        self,
        keeper: PrefixKeeper,
        copies: Copies,
        routers_up: Callable[[], Awaitable[frozenset[str]]],
        hashes: Callable[[array[int], str], Awaitable[PackedHashes]],
        clock: Callable[[], float],
    ) -> None:
        """routers_up: names of the other Routers that answer now. hashes: of token ids under a salt."""
        self._keeper = keeper
        self._copies = copies
        self._routers_up = routers_up
        self._hashes = hashes
        self._clock = clock
        self._missed_since: dict[str, float] = {}  # Routers that keep something and do not answer
        self._watching: asyncio.Task[None] | None = None
        self._has_replicas = self._is_closed = False

    def watch(self, replicas: Mapping[ReplicaId, object]) -> None:
        """The replicas there are now. Needs a running event loop."""
        self._has_replicas = bool(replicas)
        if self._has_replicas and self._watching is None and not self._is_closed:
            # In a context of its own: membership may have been heard in some request's.
            self._watching = asyncio.create_task(
                self._run(), name="prefixes without a Router", context=contextvars.Context()
            )

    async def look(self) -> None:
        """Adopt what nobody keeps."""
        orphans = [pin for pin in self._keeper.pins() if pin.replicas and not self._keeper.keeps(pin.pin_id)]
        # Its own that it does not keep: an adoption that came to no end.
        nobodys = {self._keeper.name, NOBODY}
        nobodys |= await self._gone({pin.keeper for pin in orphans} - nobodys)
        for pin in orphans:
            if pin.keeper in nobodys:
                await self._adopt(pin)

    async def aclose(self) -> None:
        """Look no more: what this Router hands on as it leaves is for others to adopt. Idempotent."""
        self._is_closed = True
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _run(self) -> None:
        while self._has_replicas:
            await asyncio.sleep(LOOK_INTERVAL_S)
            try:
                await self.look()
            except Exception as error:
                # What is wrong with one look the next one finds again; leases end by themselves.
                logger.error("looking for orphans failed", extra={"error_type": type(error).__name__})
        self._watching = None

    async def _gone(self, keepers: set[str]) -> set[str]:
        """Of these Routers, those that have not answered for long enough."""
        up = await self._routers_up() if keepers else frozenset()
        now = self._clock()
        self._missed_since = {name: self._missed_since.get(name, now) for name in keepers - up}
        return {name for name, since in self._missed_since.items() if now - since >= GONE_AFTER_S}

    async def _adopt(self, pin: PinnedPrefix) -> None:
        held = await self._take_over(pin)
        if held is None:
            return
        prefix = Prefix(held.token_ids, await self._hashes(held.token_ids, held.cache_salt), held.cache_salt)
        if self._keeper.adopt(pin, prefix):
            logger.info("a held prefix was adopted", extra={"pin_id": pin.pin_id, "from_router": pin.keeper})

    async def _take_over(self, pin: PinnedPrefix) -> HeldPrefix | None:
        """What is held, once its holders name this Router; None where another is to keep it."""
        taken = await self._ask(pin.pin_id, pin.replicas[0], pin.keeper)
        if taken is not None:
            for name in pin.replicas[1:]:  # nobody waits for this, and Serve confuses calls made at once
                await self._ask(pin.pin_id, name, pin.keeper)
        return taken

    async def _ask(self, pin_id: PinId, holder: ReplicaId, keeper: str) -> HeldPrefix | None:
        return await self._copies.inherit(pin_id, holder, keeper=keeper, heir=self._keeper.name)
