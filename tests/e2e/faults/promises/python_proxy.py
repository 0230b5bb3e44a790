"""Replicas and a Router killed behind Serve's own Python proxy, in place of the fast one.

It asks no other Router once one has taken a request, so those under way in a dead one fail there too. Tried
when it is asked for by name: what is promised is the same, and so is what keeps it.
"""

from __future__ import annotations

from dataclasses import replace

from tests.e2e.faults import fleet
from tests.e2e.faults.checks import Row
from tests.e2e.faults.cluster import cluster
from tests.e2e.faults.promises.replica_deaths import under_load, undisturbed
from tests.e2e.faults.promises.routers import one_of_two_killed

BY_NAME = True


async def run(duration_s: float) -> list[Row]:
    """duration_s: of load, half of it around replicas' deaths."""
    spec = replace(fleet.spec(), proxy="python")
    async with cluster(spec) as running:
        truth = await undisturbed(running, fleet.questions())
        rows = await under_load(running, truth, duration_s / 2)
    rows += await one_of_two_killed(spec, duration_s / 2)
    return [replace(row, promise=f"Python proxy: {row.promise}") for row in rows]
