"""What a comparison will do: pure values, and the order they are done in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loadtest.comparison.contender import Contender
from loadtest.open_loop.tally import Targets
from loadtest.workloads.reference import WorkloadRef

WARM_SHARE = 8  # of a run's requests the first eighth only warms the caches, as in the simulator


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload at one rate, for so many seconds of arrivals."""

    workload: WorkloadRef
    rate_per_s: float
    seconds: float

    @property
    def num_requests(self) -> int:
        """At least two, or there is no rate; those that only warm the caches included."""
        return max(2 * WARM_SHARE, round(self.rate_per_s * self.seconds))


@dataclass(frozen=True, slots=True)
class Search:
    """Find the highest rate that keeps the targets."""

    workload: WorkloadRef
    first_per_s: float
    seconds: float  # of each try
    precision: float = 0.08

    def cell(self, rate_per_s: float) -> Cell:
        return Cell(self.workload, rate_per_s, self.seconds)


@dataclass(frozen=True, slots=True)
class Plan:
    contenders: tuple[Contender, ...]
    cells: tuple[Cell, ...]
    searches: tuple[Search, ...]
    repeats: int
    seed: int
    targets: Targets
    max_context: int | None = None  # tokens of prompt and answer: longer ones are cut
    uses_text: bool = False  # prompts as text, for servers that take no token ids

    def order(self) -> Iterator[tuple[int, Contender]]:
        """(repeat, contender): in every repeat all of them, and somebody else first."""
        for repeat in range(self.repeats):
            yield from ((repeat, contender) for contender in rotated(self.contenders, repeat))


def rotated(contenders: Sequence[Contender], by: int) -> list[Contender]:
    place = by % len(contenders)
    return [*contenders[place:], *contenders[:place]]
