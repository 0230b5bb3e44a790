"""A workload at a given load of a given fleet.

Load 1.0 is the rate at which the work left after the hits of one pooled cache fills all engines; what that
rate is for a workload, the simulation says (`Saturation`). A source reaches a rate with more or fewer
sessions at a time; gaps inside a session stay what they were: squeezing time would make caches look better
than they are. Knows rates and windows; knows neither engines nor policies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cache.counted import counted
from loadtest.workloads.errors import WorkloadError
from loadtest.workloads.request import Workload

Saturation = Callable[[Workload], float]  # requests/s of this mix that fill the fleet: load 1.0

TOLERANCE = 0.005  # of the load asked for; windows of equal seed differ by less than their policies do
MAX_ROUNDS = 16  # each a window and a pass over the pooled cache


class Source(Protocol):
    """Where windows of one kind of traffic come from."""

    @property
    def name(self) -> str: ...

    @property
    def block_tokens(self) -> int: ...

    @property
    def natural_rate_per_s(self) -> float:
        """Requests per second as recorded, or as the generator's own parameters say."""

    def window(self, rate_per_s: float, num_requests: int, seed: int) -> Workload:
        """So many requests at about that rate, starting anywhere. The same arguments give the same window."""


@dataclass(frozen=True, slots=True)
class LoadedWorkload:
    """A window and how busy it keeps the fleet."""

    workload: Workload
    load: float  # as realised: the window's rate over its saturation rate
    saturation_per_s: float


def at_load(
    source: Source, load: float, saturation: Saturation, *, num_requests: int, seed: int
) -> LoadedWorkload:
    """A window whose rate is `load` times what fills the fleet.

    What fills it depends on the hits, and these on how dense the window is, so it is found in rounds; a
    trace's own ups and downs are levelled by the same rounds. Deterministic in its arguments, whatever the
    policy: windows of equal seed are paired. Raises WorkloadError if no window comes within five times the
    tolerance.
    """
    if not load > 0:
        raise WorkloadError(f"load {load:g} is not positive")
    best = _nearest(
        source,
        load,
        saturation,
        first_per_s=source.natural_rate_per_s,
        num_requests=num_requests,
        seed=seed,
    )
    if abs(best.load - load) > 5 * TOLERANCE * load:
        raise WorkloadError(
            f"{source.name}: no window at load {load:g}; the nearest of {counted(num_requests, 'request')} "
            f"has {best.load:.3f}{_what_to_do(best, load)}"
        )
    return best


def _what_to_do(best: LoadedWorkload, load: float) -> str:
    """Longer windows come nearer, unless one session is more than what is missing."""
    requests = best.workload.requests
    ((_, most),) = Counter(request.session for request in requests).most_common(1)
    share = most / len(requests)
    if share < abs(best.load - load) / load:
        return ": longer windows (--requests) come nearer"
    return (
        f": sessions come whole, and one has {share:.0%} of these requests. Where that is no single "
        "conversation, leave `session` out of the trace: sessions are then found from what prompts share"
    )


def at_rate(source: Source, rate_per_s: float, *, num_requests: int, seed: int) -> Workload:
    """The window whose own rate is nearest to the one asked for, within `TOLERANCE` where there is one.

    Found as `at_load` finds it: what a source draws at some rate comes a fifth faster or slower now and then,
    and a server's highest rate is not known better than the rate that it was sent. A window that arrives at
    one instant, as a trace's coarse clock has it, is left as it is.
    """
    drawn = source.window(rate_per_s, num_requests, seed)
    if not drawn.duration_s:
        return drawn
    return _nearest(
        source,
        rate_per_s,
        lambda workload: 1.0,
        first_per_s=rate_per_s,
        num_requests=num_requests,
        seed=seed,
    ).workload


def _nearest(
    source: Source,
    load: float,
    saturation: Saturation,
    *,
    first_per_s: float,
    num_requests: int,
    seed: int,
) -> LoadedWorkload:
    """The first window within the tolerance, or the nearest of `MAX_ROUNDS`."""
    rate = first_per_s
    low = high = 0.0  # the highest rate found too light and the lowest found too heavy; 0 = none yet
    best: LoadedWorkload | None = None
    for _ in range(MAX_ROUNDS):
        workload = source.window(rate, num_requests, seed)
        filled_at = saturation(workload)
        own_rate = workload.rate_per_s if workload.duration_s else math.inf
        found = LoadedWorkload(workload, own_rate / filled_at, filled_at)
        if best is None or abs(found.load - load) < abs(best.load - load):
            best = found
        if abs(best.load - load) <= TOLERANCE * load:
            return best
        if found.load < load:
            low = max(low, rate)
        else:
            high = min(high or rate, rate)
        guess = rate / 2 if math.isinf(found.load) else rate * load / found.load
        # Outside what is known the proportion leads on; where a window jumps (one more session, one more
        # stretch) only halving closes in.
        is_inside = not (low and high) or low < guess < high
        rate = guess if is_inside else math.sqrt(low * high)
    assert best is not None
    return best
