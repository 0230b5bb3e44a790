"""What was given back is remembered until each replica has reported without it, or its time is over."""

from __future__ import annotations

import logging

import pytest

from cache.types import PinId, ReplicaId
from router.prefixes import tombstones
from router.prefixes.holdings import holdings
from router.prefixes.tombstones import END_AGAIN_S, FORGET_S, Tombstones
from tests.fakes.prefixes import PaperRouter

PIN = PinId("prefix-1")
LEAST_S, MOST_S = FORGET_S, 600.0


class Looker:
    """One Router's tombstones, and what it sees when it looks."""

    def __init__(self, router: PaperRouter) -> None:
        self.router, self.fleet, self.clock = router, router.fleet, router.clock
        self.engines = router.engines
        self.tombstones = Tombstones(router.clock)

    def add(self, pin_id: str = PIN, *holders: ReplicaId) -> None:
        self.tombstones.add(PinId(pin_id), self.engines(), holders, least_s=LEAST_S, most_s=MOST_S)

    def lasting(self) -> list[PinId]:
        return list(self.tombstones.lasting().seconds)

    def look(self, after_s: float = 0.5) -> list[tuple[PinId, ReplicaId]]:
        """Some time later, with new reports of those that can be heard."""
        self.clock.advance(after_s)
        self.fleet.tell()
        return self.tombstones.look(holdings(self.engines()), self.engines())


@pytest.fixture
def looker(router: PaperRouter) -> Looker:
    return Looker(router)


def test_what_every_replica_has_confirmed_is_soon_forgotten(looker: Looker) -> None:
    looker.add()
    assert looker.lasting() == [PIN]
    looker.look()
    assert looker.lasting() == []
    looker.look(FORGET_S - 0.1)
    assert PIN in looker.tombstones
    looker.look(0.2)
    assert PIN not in looker.tombstones
    assert len(looker.tombstones) == 0


def test_a_replica_that_is_not_heard_of_is_awaited(looker: Looker) -> None:
    """It hangs, or the network has lost it: a minute later it may tell."""
    looker.fleet.mute.add(ReplicaId("r1"))
    looker.add()
    for _ in range(6):
        looker.look(10.0)
    assert PIN in looker.tombstones
    looker.fleet.mute.clear()
    looker.look()
    assert looker.lasting() == []
    looker.look(FORGET_S)
    looker.look()
    assert len(looker.tombstones) == 0


def test_so_is_one_that_was_never_heard_of_and_one_that_has_left(looker: Looker) -> None:
    del looker.fleet.reports[ReplicaId("r0")]
    looker.fleet.mute.add(ReplicaId("r0"))
    looker.add("one", ReplicaId("elsewhere"))
    looker.look(10.0)
    looker.fleet.mute.clear()
    looker.look()
    assert looker.lasting() == ["one"]  # for the sake of the other
    looker.look(MOST_S)
    looker.look()
    assert len(looker.tombstones) == 0


def test_so_is_one_that_leaves_before_it_reports(looker: Looker) -> None:
    """A list of replicas may lack one for a moment."""
    looker.add()
    looker.fleet.lose(ReplicaId("r0"))
    looker.look()
    assert looker.tombstones.lasting().replicas == ("r0",)


def test_given_back_once_more_it_is_awaited_of_all_once_more(looker: Looker) -> None:
    """Also of those that were awaited still, whether they are known now or not."""
    looker.add(PIN, ReplicaId("away"))
    looker.look()
    looker.fleet.mute.add(ReplicaId("r0"))
    looker.add()
    looker.look()
    assert looker.tombstones.lasting().replicas == ("away", "r0")


async def test_what_is_told_all_the_same_is_ended_again_but_not_at_once(
    router: PaperRouter, looker: Looker
) -> None:
    pin_id = PinId(await router.hold(copies=1, seconds=MOST_S))
    looker.fleet.tell()
    (holder,) = looker.fleet.holders(pin_id)
    looker.add(pin_id)
    assert looker.look() == [(pin_id, holder)]
    assert looker.look() == []
    assert looker.look() == []
    assert looker.look(END_AGAIN_S) == [(pin_id, holder)]
    looker.fleet.mute.add(holder)
    assert looker.look(END_AGAIN_S) == []  # it has said nothing since
    looker.fleet.mute.clear()
    assert looker.look() == [(pin_id, holder)]
    del looker.fleet.replicas[holder].pins[pin_id]
    assert looker.look() == []
    assert looker.lasting() == []


async def test_however_many_there_are_a_look_costs_no_more(
    router: PaperRouter, looker: Looker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60,000 that await a replica took up to half a second of the event loop, twice a second. What is told
    is not left for another look."""
    monkeypatch.setattr(tombstones, "MAX_PER_LOOK", 10)
    for number in range(34):
        looker.add(f"prefix-{number}")
    told = PinId(await router.hold(copies=1, seconds=MOST_S))
    looker.fleet.tell()
    (holder,) = looker.fleet.holders(told)
    looker.add(told)
    assert looker.look() == [(told, holder)]
    left = [len(looker.lasting())]
    del looker.fleet.replicas[holder].pins[told]
    for _ in range(3):
        looker.look()
        left.append(len(looker.lasting()))
    assert left == [25, 15, 5, 0]


def test_what_makes_room_is_looked_at_no_more(looker: Looker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstones, "MAX_PER_LOOK", 2)
    monkeypatch.setattr(tombstones, "MAX_TOMBSTONES", 4)
    for number in range(4):
        looker.add(f"prefix-{number}")
    looker.look()
    for number in range(4, 8):
        looker.add(f"prefix-{number}")
    for _ in range(3):
        looker.look()
    assert looker.lasting() == []
    assert len(looker.tombstones) == 4


def test_what_lasts_is_remembered_elsewhere_as_long_and_for_the_same_replicas(looker: Looker) -> None:
    """By a Router that does not know all of them yet."""
    away = ReplicaId("away")
    looker.add("confirmed")
    looker.tombstones.add(PinId("in the making"), looker.engines(), least_s=100.0, most_s=MOST_S)
    looker.look()
    looker.add("awaited", away)
    looker.look(9.5)
    given_back = looker.tombstones.lasting()
    assert given_back.seconds == {"in the making": (90.0, MOST_S - 10.0), "awaited": (0.0, MOST_S - 9.5)}
    assert given_back.replicas == (away,)
    heir = Looker(looker.router)
    heir.tombstones.add_all(given_back, heir.engines())
    heir.look(20.0)
    assert heir.lasting() == list(given_back.seconds)
    heir.look(MOST_S)
    assert PinId("awaited") not in heir.tombstones


def test_their_number_is_bounded(
    looker: Looker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tombstones, "MAX_TOMBSTONES", 3)
    with caplog.at_level(logging.WARNING):
        for number in range(6):
            looker.add(f"prefix-{number}")
    kept = [number for number in range(6) if PinId(f"prefix-{number}") in looker.tombstones]
    assert kept == [3, 4, 5]
    assert len(caplog.records) == 1
