"""What can go wrong with replicas that really run. Light to import: the command line knows it by name."""

from __future__ import annotations


class FleetFailed(Exception):
    """A replica did not start, or a request did not end as it should."""
