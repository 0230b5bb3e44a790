"""A replica's last seconds, in virtual time."""

from __future__ import annotations

import pytest

from replica.departure import HAND_OVER_BEFORE_S, Departure
from tests.fakes.engine import VirtualClock


class Leaver:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.given_s: float | None = None
        self.told: list[tuple[float, str]] = []
        self.departure = Departure(self, lambda: self.given_s, clock=lambda: self.clock.now_s)

    def drain(self) -> None:
        self.told.append((self.clock.now_s, "drain"))

    def hand_over(self) -> None:
        self.told.append((self.clock.now_s, "hand over"))

    def look_until(self, end_s: float) -> None:
        while self.clock.now_s < end_s:
            self.departure.check()
            self.clock.sleep(0.125)


@pytest.mark.parametrize(("given_s", "before_s"), [(30.0, HAND_OVER_BEFORE_S), (3.0, 1.0)])
def test_says_at_once_that_it_leaves_and_hands_over_in_time(given_s: float, before_s: float) -> None:
    leaver = Leaver()
    leaver.look_until(100.0)
    assert leaver.told == []
    leaver.given_s = given_s
    leaver.look_until(100.0 + given_s)
    assert leaver.told == [(100.0, "drain"), (100.0 + given_s - before_s, "hand over")]


def test_no_time_at_all_is_handed_over_at_once() -> None:
    leaver = Leaver()
    leaver.given_s = 0.0
    leaver.look_until(1.0)
    assert leaver.told == [(0.0, "drain"), (0.0, "hand over")]


def test_close_may_be_called_twice_and_before_start() -> None:
    never, started = Leaver().departure, Leaver().departure
    never.close()
    started.start()
    started.close()
    started.close()
