"""Arrivals of a trace whose clock ticks, spread over each tick.

Published traces may round times: Mooncake's to 3 s, so that ten requests arrive at one instant and then none.
No service meets that: the first of the ten finds idle replicas, the last the other nine, and several routers
decide at once, none of them knowing what the others did. Knows times; knows neither files nor engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from loadtest.workloads.request import Workload, by_prompt


def spread_over_ticks(workload: Workload) -> Workload:
    """The same requests in the same order; those of one instant evenly over the tick that it opens.

    A tick is the shortest time between two different arrivals, so a trace with a fine clock stays as it is
    but for that much. Nobody moves by a tick or more, and the first of an instant does not move at all.
    """
    tick_s = _tick_s([request.arrival_s for request in workload.requests])
    spread = []
    for _, together in groupby(workload.requests, key=lambda request: request.arrival_s):
        crowd = list(by_prompt(together))
        spread += [
            replace(request, arrival_s=request.arrival_s + tick_s * index / len(crowd))
            for index, answers in enumerate(crowd)
            for request in answers
        ]
    return replace(workload, requests=tuple(spread))


def _tick_s(times: Sequence[float]) -> float:
    """0 for a trace of one instant."""
    instants = sorted(set(times))
    return min((after - before for before, after in pairwise(instants)), default=0.0)
