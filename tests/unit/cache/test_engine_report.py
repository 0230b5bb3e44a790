"""Engine reports on the wire: round trip, caps, versions, and counts that fit their bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cache.engine_report import (
    BOUNDS,
    MAX_PINS,
    MAX_REPORT_BYTES,
    Distribution,
    EngineReport,
    HeldPin,
    Tally,
    decode_report,
    encode_report,
)
from cache.errors import WireError
from cache.types import PinId
from tests.fakes.reports import an_engine_report


def spoilt(spoil: Callable[[dict[str, Any]], object]) -> bytes:
    value = msgspec.msgpack.decode(encode_report(an_engine_report()))
    spoil(value)
    return msgspec.msgpack.encode(value)


def test_what_is_sent_is_what_arrives() -> None:
    report = an_engine_report(number=7, generated_tokens=1 << 40)
    assert decode_report(encode_report(report)) == report


def test_every_distribution_has_its_bounds_ascending() -> None:
    fields = {field.name for field in msgspec.structs.fields(EngineReport) if field.type is Distribution}
    assert fields == set(BOUNDS)
    for bounds in BOUNDS.values():
        assert list(bounds) == sorted(set(bounds))


def test_a_large_report_is_far_below_the_cap() -> None:
    full = Distribution((1 << 40,) * 64, 1e300)
    huge = an_engine_report(**{name: full for name in BOUNDS})
    assert len(encode_report(huge)) < MAX_REPORT_BYTES / 4


def test_a_tally_counts_each_value_at_the_first_bound_it_does_not_exceed() -> None:
    tally = Tally((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.1, 100.0):
        tally.add(value)
    assert tally.distribution() == Distribution((2, 2, 2), 106.6)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda v: v.update(version=1),
        lambda v: v.update(prompt_tokens=-1),
        lambda v: v.update(prompt_tokens=1.5),
        lambda v: v.update(surprise=1),
        lambda v: v.pop("epoch"),
        lambda v: v.update(type="batch"),
        lambda v: v.update(pins=[["p", "o", -1, 1, 0.0, 0.0]]),
        lambda v: v.update(pins=[["p", "o", 1, 1, 0.0, float("nan")]]),
        lambda v: v.update(pins=[["p" * 65, "o", 1, 1, 0.0, 0.0]]),
        lambda v: v.update(pins=[["p", "o", 1, 1, 0.0, 0.0]] * 257),
        lambda v: v["queue_s"][0].pop(),
        lambda v: v["queue_s"][0].append(1),
        lambda v: v["queue_s"].__setitem__(1, float("nan")),
        lambda v: v["queue_s"].__setitem__(1, float("inf")),
        lambda v: v["queue_s"].__setitem__(1, -1.0),
        lambda v: v["queue_s"][0].__setitem__(0, -1),
    ],
)
def test_what_does_not_fit_is_refused(spoil: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(WireError):
        decode_report(spoilt(spoil))


@pytest.mark.parametrize("wire", [b"", b"\xc1", b"\x80", b"x" * (MAX_REPORT_BYTES + 1)])
def test_other_bytes_are_refused(wire: bytes) -> None:
    with pytest.raises(WireError):
        decode_report(wire)


def test_a_report_no_receiver_would_take_is_not_sent() -> None:
    with pytest.raises(WireError):
        encode_report(an_engine_report(step_tokens=Distribution((1 << 63,) * 10_000, 0.0)))


def test_as_many_pins_as_there_may_be_fit() -> None:
    pin = HeldPin(PinId("p" * 64), "o" * 64, 1 << 24, 10_000, 1.8e9, 1.8e9, "k" * 32)
    report = an_engine_report(pins=(pin,) * MAX_PINS)
    assert decode_report(encode_report(report)) == report
