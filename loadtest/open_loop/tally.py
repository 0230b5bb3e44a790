"""What one run was, counted as its answers come in: distributions, sums, and how they went over time.

Memory grows with the run's length in bins of a second, and not with its requests. Knows answers; knows
neither sockets nor tables.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from loadtest.client.answer import Answer, Failure
from loadtest.open_loop.histogram import Histogram

UNKNOWN = "not told"
_KEPT_PROBLEMS = 5  # of each kind of failure: enough to see what it is


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request must keep to count as good, seconds. None = no such target."""

    ttft_s: float | None = None
    gap_s: float | None = None  # its longest gap between two pieces

    def are_met(self, ttft_s: float, answer: Answer) -> bool:
        if self.ttft_s is not None and ttft_s > self.ttft_s:
            return False
        return self.gap_s is None or max(answer.gaps_s, default=0.0) <= self.gap_s


@dataclass(slots=True)
class ReplicaShare:
    """One replica's part of the whole answers."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass(slots=True)
class Bin:
    """One second of a run; requests belong to the second they were due in."""

    due: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    in_flight: int = 0  # sent and not over when the second ended


@dataclass(slots=True)
class Tally:
    """Counts what is due at `counted_from_s` or later: the first requests only warm the caches."""

    targets: Targets = field(default_factory=Targets)
    counted_from_s: float = 0.0
    num_replicas: int = 0  # of the server, where that is known: those that answered nothing count too
    due: int = 0
    answers: int = 0  # whole ones
    good: int = 0  # whole ones that kept the targets
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    untold: int = 0  # whole answers of which the server did not tell the cached tokens
    ttft: Histogram = field(default_factory=Histogram)  # from when it was due
    gaps: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    took: Histogram = field(default_factory=Histogram)  # from when it was due
    late: Histogram = field(default_factory=Histogram)  # from when it was due to when it was sent
    failures: dict[str, int] = field(default_factory=dict)
    warming_failures: dict[str, int] = field(default_factory=dict)  # of those that do not count
    problems: dict[str, list[str]] = field(default_factory=dict)
    finish_reasons: dict[str, int] = field(default_factory=dict)
    replicas: dict[str, ReplicaShare] = field(default_factory=dict)
    bins: list[Bin] = field(default_factory=list)  # of the whole run, the warm-up too
    counted_s: float = 0.0  # from the first counted arrival's due time to the last one's

    def sent(self, due_s: float, late_s: float) -> None:
        self._bin(due_s).due += 1
        if due_s >= self.counted_from_s:
            self.due += 1
            self.late.add(late_s)
            self.counted_s = max(self.counted_s, due_s - self.counted_from_s)

    def answered(self, due_s: float, late_s: float, answer: Answer) -> None:
        """late_s: as `sent` was told; times count from when the request was due, not from when it went."""
        counts = due_s >= self.counted_from_s
        if answer.failure is not None:
            failures = self.failures if counts else self.warming_failures
            self._failed(failures, answer.failure.value, answer.problem)
            return
        prompt, cached = answer.prompt_tokens, answer.cached_tokens
        if prompt is not None and cached is not None:
            of_second = self._bin(due_s)
            of_second.prompt_tokens += prompt
            of_second.cached_tokens += cached
        if counts:
            self._whole(late_s, answer)

    def seen(self, second: int, in_flight: int) -> None:
        """How many were on their way when that second of the run ended."""
        self._bin(float(second)).in_flight = in_flight

    @property
    def hit_ratio(self) -> float | None:
        """Cached over prompt tokens, the engine's count; None where the server did not tell."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    @property
    def unanswered(self) -> int:
        """On their way: in a run that is over, those for which nobody waited any more."""
        return self.due - self.answers - self.num_failed

    @property
    def broken(self) -> dict[str, int]:
        """Answers that failed, by kind, those that only warmed the caches too, but for those that the server
        said at once it was too busy for."""
        total = Counter(self.failures) + Counter(self.warming_failures)
        return {kind: number for kind, number in total.items() if kind != Failure.BUSY}

    @property
    def num_sent(self) -> int:
        """Those that only warm the caches too."""
        return sum(each.due for each in self.bins)

    @property
    def goodput_per_s(self) -> float:
        """The part of requests that got good answers, of the rate they came at: at most that rate. Those that
        nobody waited for are not known to be either. NaN where all came at one instant, or none is over."""
        num_over = self.due - self.unanswered
        if not self.counted_s or not num_over:
            return math.nan
        rate_per_s = (self.due - 1) / self.counted_s  # gaps, one fewer than requests, as everywhere
        return rate_per_s * self.good / num_over

    @property
    def imbalance(self) -> float | None:
        """Prompt tokens computed by the busiest replica over the mean; None where none is named."""
        named = [share.computed_tokens for name, share in self.replicas.items() if name != UNKNOWN]
        num_replicas = max(len(named), self.num_replicas)
        return max(named) * num_replicas / sum(named) if named and sum(named) else None

    def _whole(self, late_s: float, answer: Answer) -> None:
        ttft_s = late_s + (answer.took_s if answer.ttft_s is None else answer.ttft_s)
        self.answers += 1
        self.good += self.targets.are_met(ttft_s, answer)
        self.ttft.add(ttft_s)
        self.took.add(late_s + answer.took_s)
        for gap_s in answer.gaps_s:
            self.gaps.add(gap_s)
        if answer.tpot_s is not None:
            self.tpot.add(answer.tpot_s)
        self.output_tokens += answer.output_tokens or 0
        for reason in answer.finish_reasons:
            self.finish_reasons[reason or UNKNOWN] = self.finish_reasons.get(reason or UNKNOWN, 0) + 1
        share = self.replicas.setdefault(answer.replica or UNKNOWN, ReplicaShare())
        share.answers += 1
        if answer.prompt_tokens is None or answer.cached_tokens is None:
            self.untold += 1
            return
        for counted in (self, share):
            counted.prompt_tokens += answer.prompt_tokens
            counted.cached_tokens += answer.cached_tokens

    def _failed(self, failures: dict[str, int], kind: str, problem: str) -> None:
        failures[kind] = failures.get(kind, 0) + 1
        known = self.problems.setdefault(kind, [])
        if len(known) < _KEPT_PROBLEMS and problem not in known:
            known.append(problem)

    def _bin(self, at_s: float) -> Bin:
        while len(self.bins) <= int(at_s):
            self.bins.append(Bin())
        return self.bins[int(at_s)]
