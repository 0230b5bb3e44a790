"""How durations are written."""

from __future__ import annotations

import pytest

from router.tenants.allowance import OPEN_VISIT, duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.0001, "1ms"),
        (0.12, "120ms"),
        (1.0, "1s"),
        (1.2, "2s"),
        (59.5, "1m0s"),
        (360.0, "6m0s"),
        (3661.0, "1h1m1s"),
        (7200.0, "2h0m0s"),
    ],
)
def test_a_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_nobodys_request_is_never_limited() -> None:
    OPEN_VISIT.charge(64, 1 << 40)
    OPEN_VISIT.spend(1 << 40)
    OPEN_VISIT.close()
    assert (OPEN_VISIT.tenant, OPEN_VISIT.headers()) == ("", {})
