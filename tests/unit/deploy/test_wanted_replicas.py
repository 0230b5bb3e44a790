"""How many replicas are wanted: worked examples. The laws are in tests/property/test_wanted_replicas.py."""

from __future__ import annotations

import pytest

from cache.errors import ConfigError
from deploy.wanted_replicas import Fleet, Targets, wanted_replicas

TARGETS = Targets(target_queued_s=1.0, target_busy=0.8)


def fleet(
    *,
    running: int = 4,
    target: int | None = None,
    busy: float = 0.0,
    refused: float = 0.0,
    queued_s: float = 0.0,
    silent: int = 0,
) -> Fleet:
    target = running if target is None else target
    return Fleet(running, target, silent, queued_s=queued_s, busy=busy, refused=refused, least=1, most=20)


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (fleet(busy=3.2, queued_s=4.0), 4),  # at both targets
        (fleet(busy=3.3), 5),
        (fleet(busy=4.0), 5),  # all of them busy: a quarter more, then look again
        (fleet(busy=4.0, refused=0.9), 7),  # all of them busy, and what 0.9 more would do is refused
        (fleet(busy=4.0, refused=8.0), 8),  # three times as much as they can do
        (fleet(busy=1.8, refused=0.1), 4),  # nobody is taken away while work is refused that needs them
        (fleet(busy=2.0, queued_s=6.5), 7),
        (fleet(busy=4.0, queued_s=100.0), 8),  # twice as many at once, no more
        (fleet(running=2, target=4, busy=2.0, queued_s=100.0), 4),  # those wanted have not come yet
        (fleet(busy=1.8, queued_s=1.5), 3),  # three would be 60% busy
        (fleet(busy=1.9, queued_s=0.0), 4),
        (fleet(busy=1.0, queued_s=2.0), 4),
        (fleet(), 3),  # nothing to do: one fewer at a time
        (fleet(silent=1), 4),
        (fleet(running=3, target=4), 4),
        (fleet(running=5, target=4), 3),  # one that leaves still runs
        (fleet(running=1), 1),
        (fleet(running=0, target=2), 2),
    ],
)
def test_by_hand(seen: Fleet, wanted: int) -> None:
    assert wanted_replicas(seen, TARGETS) == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [("target_queued_s", 0.0), ("target_queued_s", "1"), ("target_busy", 1.0), ("target_busy", True)],
)
def test_a_target_that_cannot_be_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} = .* must be between"):
        Targets(**{name: value})  # type: ignore[arg-type]
