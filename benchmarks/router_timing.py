"""Short calls, one by one, on two clocks; and what they add up to. Knows no router.

A call of microseconds is timed with clocks that cost half a microsecond to read: that is measured and
taken off. CPU time is the thread's own, so that neighbours on the machine do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Spread:
    """Of many calls, microseconds."""

    p50_us: float
    p99_us: float
    max_us: float
    wall_p50_us: float
    wall_p99_us: float
    num_calls: int


def spread_of(calls: Iterable[Callable[[], object]]) -> Spread:
    """Time each call once, in this order."""
    cpu_ns, wall_ns = [], []
    for call in calls:
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        call()
        cpu_ns.append(time.thread_time_ns() - cpu)
        wall_ns.append(time.perf_counter_ns() - wall)
    return summary(cpu_ns, wall_ns)


def summary(cpu_ns: Sequence[int], wall_ns: Sequence[int]) -> Spread:
    cpu = sorted([max(0.0, (time_ns - _OVERHEAD_NS[0]) / 1000) for time_ns in cpu_ns])
    wall = sorted([max(0.0, (time_ns - _OVERHEAD_NS[1]) / 1000) for time_ns in wall_ns])
    return Spread(
        quantile(cpu, 0.5), quantile(cpu, 0.99), cpu[-1], quantile(wall, 0.5), quantile(wall, 0.99), len(cpu)
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least that share does not exceed."""
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def _overhead_ns() -> tuple[float, float]:
    cpu_ns, wall_ns = [], []
    for _ in range(2000):
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        _nothing()
        cpu_ns.append(time.thread_time_ns() - cpu)
        wall_ns.append(time.perf_counter_ns() - wall)
    return median(cpu_ns), median(wall_ns)


def _nothing() -> None:
    pass


_OVERHEAD_NS = _overhead_ns()
