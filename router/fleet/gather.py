"""`/metrics` for the whole fleet from whichever Router is asked.

    scrape ──> ask every other Router, at once ──> its own series and last engine reports, in bytes
                     │ no answer in time                 │
                     └── its last answer stands, up = 0  └──> newest of everything ──> one exposition

Two Routers scraped in turn must tell one story: no counter may be smaller at one than it just was at the
other. So every report is numbered by who made it, the highest number wins wherever it was heard, and whoever
asks learns what the others last heard from a Router that has fallen silent.
Knows reports and time; knows neither Serve (`router/serve_peers.py`) nor what the series mean.
Owner: the router's event loop; only the writing of the text is done on another thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.core import Metric

from cache.engine_report import EngineReport
from cache.errors import WireError
from cache.types import ReplicaId
from router.fleet.engine_series import EngineView, engine_families
from router.fleet.exposition import merged, text
from router.fleet.report import (
    FORMAT_VERSION,
    ROUTER_LABEL,
    Family,
    FleetReport,
    RouterReport,
    Series,
    decode_fleet,
    encode_fleet,
    families_of,
    labelled,
)
from router.fleet.rounds import Rounds

ANSWER_TIMEOUT_S = 0.5  # a Router answers within milliseconds; a scrape waits for at most two rounds
# How long the counters of a Router that is gone are still told: several scrapes, so that whoever scrapes sees
# what it counted last, and no dip where it was only slow.
KEEP_S = 120.0
MAX_KEPT = 64  # Routers that are gone; the oldest give way

logger = logging.getLogger(__name__)


class Peers(Protocol):
    """The other Routers of this application."""

    async def ask(self, asker: str, wanted: Sequence[str], timeout_s: float) -> list[bytes]:
        """What each says to `FleetMetrics.answer(asker, wanted)`, as far as it says it in time.

        Who asks may be among those asked. Raises nothing.
        """


class NoPeers:
    """A Router that knows of no other."""

    async def ask(self, asker: str, wanted: Sequence[str], timeout_s: float) -> list[bytes]:
        return []


@dataclass(frozen=True, slots=True)
class _Heard:
    """The latest of another Router, wherever it was heard."""

    report: RouterReport
    made_at: float  # our clock


class FleetMetrics:
    """What one Router knows of all of them. `aclose` once done."""

    def __init__(
        self,
        router: str,
        *,
        model_name: str,
        own: Callable[[], Iterable[Metric]],
        engines: Callable[[], Mapping[ReplicaId, EngineView]],
        clock: Callable[[], float],
    ) -> None:
        """router: this one's name, of this life of its process. own: its series as they are now; engines: the
        replicas it knows. Both are called on the event loop, at every scrape."""
        self.router = router
        self.peers: Peers = NoPeers()
        self._model_name = model_name
        self._own = own
        self._engines = engines
        self._clock = clock
        self._number = 0
        self._heard: dict[str, _Heard] = {}
        self._silent: frozenset[str] = frozenset()  # known Routers that did not answer the last round
        self._engine_reports: dict[ReplicaId, EngineReport] = {}  # newest heard, of replicas known here
        self._rounds = Rounds(self._round, "ask the routers")

    async def text(self) -> bytes:
        """The exposition of the fleet. As quick as the slowest Router, or `2 * ANSWER_TIMEOUT_S`."""
        up = await self.hear_all()
        parts = [(self._report(), True)]
        parts += [
            (heard.report, heard.report.router in up)
            for heard in sorted(self._heard.values(), key=lambda heard: heard.report.router)
        ]
        engines = self._newest_engines()
        return await asyncio.to_thread(_exposition, self._model_name, parts, engines)

    def answer(self, asker: str, wanted: Sequence[str]) -> bytes:
        """What this Router tells `asker`: b"" if that is itself. wanted: silent Routers that it would like to
        hear the last of; those that are silent here are told in any case. Raises WireError if it is too much.
        """
        if asker == self.router:
            return b""
        now = self._clock()
        self._forget(now)
        others = [
            RouterReport(name, heard.report.number, now - heard.made_at, heard.report.families)
            for name in sorted(self._silent.union(wanted))
            if name != asker and (heard := self._heard.get(name)) is not None
        ]
        engines = {
            replica: view.report
            for replica, view in self._newest_engines().items()
            if view.report is not None
        }
        return encode_fleet(FleetReport(FORMAT_VERSION, self.router, (self._report(), *others), engines))

    async def aclose(self) -> None:
        """Idempotent."""
        await self._rounds.aclose()

    # --- asking -------------------------------------------------------------------------------

    async def hear_all(self) -> frozenset[str]:
        """Ask everybody anew; the names of those who answered in time. Scrapes that come at once share it."""
        return await self._rounds.next()

    async def _round(self) -> frozenset[str]:
        asked = self._silent
        up = self._take_all(await self.peers.ask(self.router, sorted(asked), ANSWER_TIMEOUT_S))
        fallen_silent = self._heard.keys() - up - asked
        if fallen_silent and up:
            # The others may have heard from it after us; had it answered, that would not matter.
            late = await self.peers.ask(self.router, sorted(fallen_silent), ANSWER_TIMEOUT_S)
            up |= self._take_all(late)
        self._silent = frozenset(self._heard.keys() - up)
        self._forget(self._clock())
        return up

    def _take_all(self, answers: Iterable[bytes]) -> frozenset[str]:
        """Learn from these answers; the names of those who gave them."""
        up: set[str] = set()
        for wire in answers:
            if not wire:
                continue  # our own
            try:
                report = decode_fleet(wire)
            except WireError as error:
                # A Router of another version, for the moment of a rolling update: not up, and not an error.
                logger.warning("a router's metrics cannot be read", extra={"detail": str(error)})
                continue
            up.add(report.router)
            self._take(report)
        return frozenset(up)

    def _take(self, answer: FleetReport) -> None:
        now = self._clock()
        for report in answer.routers:
            heard = self._heard.get(report.router)
            if report.router != self.router and (heard is None or report.number > heard.report.number):
                self._heard[report.router] = _Heard(report, now - report.age_s)
        for replica, engine in answer.engines.items():
            self._engine_reports[replica] = _newer(self._engine_reports.get(replica), engine)

    def _forget(self, now: float) -> None:
        """Drop what is too old to be told. Of Routers that answer it is never old."""
        for name in [name for name, heard in self._heard.items() if now - heard.made_at > KEEP_S]:
            del self._heard[name]
        self._silent &= self._heard.keys()
        by_age = sorted(self._silent, key=lambda name: self._heard[name].made_at)
        for name in by_age[:-MAX_KEPT]:
            del self._heard[name]
        self._silent &= self._heard.keys()

    # --- telling ------------------------------------------------------------------------------

    def _report(self) -> RouterReport:
        self._number += 1
        return RouterReport(self.router, self._number, 0.0, families_of(self._own()))

    def _newest_engines(self) -> dict[ReplicaId, EngineView]:
        """The replicas known here with the newest report anybody has heard; what left is forgotten."""
        views = self._engines()
        newest: dict[ReplicaId, EngineView] = {}
        for replica, view in views.items():
            report = _newest(own=view.report, elsewhere=self._engine_reports.get(replica))
            newest[replica] = EngineView(view.info, report)
        self._engine_reports = {
            replica: view.report for replica, view in newest.items() if view.report is not None
        }
        return newest


def _newest(own: EngineReport | None, elsewhere: EngineReport | None) -> EngineReport | None:
    """Of two lives of one engine, the one heard directly is the present one."""
    if own is None or elsewhere is None:
        return own or elsewhere
    return elsewhere if elsewhere.epoch == own.epoch and elsewhere.number > own.number else own


def _newer(known: EngineReport | None, heard: EngineReport) -> EngineReport:
    if known is None or known.epoch != heard.epoch:
        return heard
    return heard if heard.number > known.number else known


def _exposition(
    model_name: str, parts: Sequence[tuple[RouterReport, bool]], engines: Mapping[ReplicaId, EngineView]
) -> bytes:
    """Any thread: everything it is given is immutable."""
    families = [_up_family(parts)]
    for report, is_up in parts:
        told = report.families if is_up else _counted(report.families)
        families += labelled(told, {ROUTER_LABEL: report.router})
    families += engine_families(model_name, engines)
    return text(merged(families))


def _counted(families: Iterable[Family]) -> Iterable[Family]:
    """What stays true of a Router that is gone: what it has counted, not how it was."""
    return [family for family in families if family.kind != "gauge"]


def _up_family(parts: Iterable[tuple[RouterReport, bool]]) -> Family:
    name = "warmpath_router_up"
    series = tuple(Series(name, {ROUTER_LABEL: report.router}, float(is_up)) for report, is_up in parts)
    return Family(
        name,
        "1 = answered this scrape; 0 = did not, its counters are the last ones it told.",
        "gauge",
        series,
    )
