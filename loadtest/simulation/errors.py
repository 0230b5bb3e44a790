"""What can go wrong with replicas that really run. Light to import: the command line knows it by name.

FleetFailed    a replica did not start, or a request did not end as it should
TooBusy        replicas waited for cores, so that their times say nothing
"""

from __future__ import annotations


class FleetFailed(Exception):
    """The message says which replica or request."""


class TooBusy(Exception):
    """No verdict, neither way."""

    def __init__(self, stolen: float) -> None:
        """stolen: share of the steps' time in which they waited for a core."""
        self.stolen = stolen
        super().__init__(
            f"the machine was too busy to tell: {100 * stolen:.0f} % of step time was waiting for a core"
        )
