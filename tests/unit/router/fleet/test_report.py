"""What Routers tell each other of their metrics: round trip, caps, versions, names that are names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cache.errors import WireError
from cache.types import ReplicaId
from router.fleet import report as wire
from router.fleet.report import FleetReport, RouterReport, decode_fleet, encode_fleet, families_of
from tests.fakes.reports import an_engine_report
from tests.fakes.routers import SomeRouters


def a_report() -> FleetReport:
    router = SomeRouters("a").routers["a"]
    router.work()
    own = RouterReport("a", 3, 0.0, families_of(router.metrics._own()))
    return FleetReport(1, "a", (own,), {ReplicaId("r1"): an_engine_report()})


def spoilt(spoil: Callable[[dict[str, Any]], object]) -> bytes:
    value = msgspec.msgpack.decode(encode_fleet(a_report()))
    spoil(value)
    return msgspec.msgpack.encode(value)


def test_what_is_sent_is_what_arrives() -> None:
    assert decode_fleet(encode_fleet(a_report())) == a_report()


def test_times_at_which_series_began_are_left_out() -> None:
    assert b"_created" not in encode_fleet(a_report())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda v: v.update(version=2),
        lambda v: v.update(router="a b"),
        lambda v: v.update(router='a"} 1\nevil'),
        lambda v: v.update(surprise=1),
        lambda v: v["routers"][0].update(number=-1),
        lambda v: v["routers"][0].update(age_s=float("nan")),
        lambda v: v["routers"][0].update(age_s=-1.0),
        lambda v: v["routers"][0]["families"][0].__setitem__(0, "no name"),
        lambda v: v["routers"][0]["families"][0].__setitem__(2, "summary"),
        lambda v: v["routers"][0]["families"][0][3][0].__setitem__(0, "x 1\ny"),
        lambda v: v["routers"][0]["families"][0][3][0][1].update({"bad label": "x"}),
        lambda v: v["routers"][0]["families"][0][3][0].__setitem__(2, "1"),
        lambda v: v["engines"]["r1"].update(prompt_tokens=-1),
        lambda v: v["engines"]["r1"]["queue_s"][0].pop(),
    ],
)
def test_what_does_not_fit_is_refused(spoil: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(WireError):
        decode_fleet(spoilt(spoil))


@pytest.mark.parametrize("content", [b"\xc1", b"\x80", b"[]"])
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(WireError):
        decode_fleet(content)


def test_what_is_too_large_is_neither_sent_nor_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encode_fleet(a_report())
    monkeypatch.setattr(wire._FORMAT, "max_bytes", len(content) - 1)
    with pytest.raises(WireError, match="at most"):
        decode_fleet(content)
    with pytest.raises(WireError, match="at most"):
        encode_fleet(a_report())
