"""What the tier tells of prompts that start without what lies in it."""

from __future__ import annotations

from cache.host_tier import HostTier


def test_only_who_could_have_copied_something_declines() -> None:
    """Others say nothing of what copying takes: counted too, they would soon force a slow copy."""
    told: list[int] = []
    tier = HostTier(4, on_declined=lambda: told.append(tier.num_declined))
    tier.decline(0)
    assert told == []
    tier.decline(2)
    tier.decline(1)
    assert told == [2, 3]
