"""The busiest stretch of a trace: so many requests in a row that bring the most work per second.

Work is what a request adds to an engine's steps once the hits of the fleet's caches are taken off
(`simulation/saturation.py`): a second of long new prompts outweighs one with more, but short, requests.
Knows traces and work; simulates nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate

from loadtest.placement.summary import WARM_UP_SHARE
from loadtest.simulation.machine import Machine
from loadtest.simulation.saturation import work_by_request
from loadtest.workloads.request import Workload


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a trace."""

    first: int  # request of the trace, from 0
    num_requests: int
    num_warming: int  # requests before it that warm the caches, and do not count
    began_s: float  # of the trace
    duration_s: float
    engines: float  # that its work keeps busy; infinite where all of it comes at one instant

    def cut(self, trace: Workload) -> Workload:
        """Its requests, behind those that warm the caches; times count from the first of all."""
        chosen = trace.requests[self.first - self.num_warming : self.first + self.num_requests]
        return replace(trace, requests=chosen).window(0.0, len(chosen))


def busiest(trace: Workload, num_requests: int, *, cache_tokens: int, machine: Machine) -> Stretch:
    """The first of those with the most work per second; all of a shorter trace. O(blocks).

    cache_tokens: of one replica. What hits leave depends on how many replicas there are, which nobody knows
    yet: as many are assumed as the work left after one replica's hits would fill.
    """
    alone = _busiest(trace, num_requests, 1, cache_tokens, machine)
    num_replicas = math.ceil(min(alone.engines, num_requests))
    return _busiest(trace, num_requests, num_replicas, cache_tokens, machine)


def _busiest(
    trace: Workload, num_requests: int, num_replicas: int, cache_tokens: int, machine: Machine
) -> Stretch:
    requests = trace.requests
    length = min(num_requests, len(requests))
    work_s = work_by_request(trace, num_replicas=num_replicas, cache_tokens=cache_tokens, machine=machine)
    work_before_s = list(accumulate(work_s, initial=0.0))

    def measured(first: int) -> tuple[float, float]:
        """Engines kept busy, then the work itself: where all comes at one instant that is more or less."""
        own_s = work_before_s[first + length] - work_before_s[first]
        duration_s = requests[first + length - 1].arrival_s - requests[first].arrival_s
        return (own_s / duration_s if duration_s else math.inf), own_s

    first = max(range(len(requests) - length + 1), key=measured)
    began_s = requests[first].arrival_s
    return Stretch(
        first=first,
        num_requests=length,
        # As many as in a comparison's window of that length, where there are.
        num_warming=min(first, round(num_requests * WARM_UP_SHARE / (1.0 - WARM_UP_SHARE))),
        began_s=began_s,
        duration_s=requests[first + length - 1].arrival_s - began_s,
        engines=measured(first)[0],
    )
