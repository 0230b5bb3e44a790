"""Windows of a recorded trace at any rate: several stretches of it, each with sessions of its own, laid
over each other.

A rate above the trace's own is reached by more stretches, one below it by leaving out whole sessions. Time
is never squeezed. Each stretch has its own copy of every session's blocks, so that sessions laid over each
other share what strangers share (the head: system prompts) and nothing else. Knows no engine.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import replace

from loadtest.workloads.errors import WorkloadError
from loadtest.workloads.request import Workload, WorkRequest
from loadtest.workloads.sessions import shared_head

# Steps around a circle that land far apart, however many: one for stretches, another for seeds. Multiples of
# both together do so too (measured: docs/benchmarks/placement.md); of draws two of the first five were
# neighbours.
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_SEED_STEP = math.e % 1.0


class TraceSource:
    """A `Source` over one trace, read as a circle: after its end it starts again, with other sessions."""

    def __init__(self, trace: Workload) -> None:
        """Raises WorkloadError for a trace without duration."""
        if not trace.duration_s:
            raise WorkloadError(f"{trace.name}: all requests arrive at once, so the trace has no rate")
        self._trace = trace
        self._requests = trace.requests
        self._head = shared_head([request.block_ids for request in trace.requests])
        self._stride = 1 + max(block for request in trace.requests for block in request.block_ids)
        self._num_sessions = 1 + max(request.session for request in trace.requests)
        self._natural_rate = trace.rate_per_s
        self._period_s = len(trace.requests) / self._natural_rate

    @property
    def name(self) -> str:
        return self._trace.name

    @property
    def block_tokens(self) -> int:
        return self._trace.block_tokens

    @property
    def natural_rate_per_s(self) -> float:
        return self._natural_rate

    @property
    def trace(self) -> Workload:
        return self._trace

    def window(self, rate_per_s: float, num_requests: int, seed: int) -> Workload:
        """See `Source`. The seed says where in the trace each stretch starts; seeds start far apart."""
        density = rate_per_s / self._natural_rate
        num_stretches = max(1, math.ceil(density - 1e-9))
        kept_share = density / num_stretches
        first_start = seed * _SEED_STEP
        stretches = [
            self._stretch(number, (first_start + number * _GOLDEN) % 1.0, kept_share, seed)
            for number in range(num_stretches)
        ]
        # Times first; a stretch's number settles ties, so windows do not depend on how requests compare.
        merged = heapq.merge(*stretches, key=lambda entry: entry[:2])
        chosen = [next(merged) for _ in range(num_requests)]
        # A stretch's earlier sessions go on into the window, so it has the trace's mix from its first second.
        began_s = chosen[0][0]
        return Workload(
            self.name,
            self.block_tokens,
            tuple(
                replace(r, arrival_s=time_s - began_s, block_ids=self._blocks(r, copy), session=session)
                for time_s, _, r, copy, session in chosen
            ),
        )

    def _stretch(
        self, number: int, start: float, kept_share: float, seed: int
    ) -> Iterator[tuple[float, int, WorkRequest, int, int]]:
        """(seconds, stretch, request, copy, session) without end, from `start` (0..1) of the trace on."""
        start_s = start * self._period_s
        rng = random.Random(f"{seed}/{number}")
        first = next(
            (i for i, request in enumerate(self._requests) if request.arrival_s >= start_s),
            len(self._requests),
        )
        round_ = 0
        position = first
        kept = self._kept(rng, kept_share)
        while True:
            if position == len(self._requests):
                position, round_ = 0, round_ + 1
                kept = self._kept(rng, kept_share)
            request = self._requests[position]
            position += 1
            if not kept[request.session]:
                continue
            copy = _pair(number, round_)
            time_s = request.arrival_s - start_s + round_ * self._period_s
            yield time_s, number, request, copy, copy * self._num_sessions + request.session

    def _kept(self, rng: random.Random, share: float) -> list[bool]:
        """Which sessions stay. One draw each whatever the share, so nearby rates keep nearly the same."""
        return [rng.random() < share for _ in range(self._num_sessions)]

    def _blocks(self, request: WorkRequest, copy: int) -> tuple[int, ...]:
        head, offset = self._head, copy * self._stride
        return tuple(block if block in head else block + offset for block in request.block_ids)


def _pair(a: int, b: int) -> int:
    """One number for two (Cantor)."""
    return (a + b) * (a + b + 1) // 2 + b
