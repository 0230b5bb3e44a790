"""What a comparison will do: pure values, and the order they are done in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loadtest.comparison.contender import Contender
from loadtest.open_loop.tally import Targets
from loadtest.workloads.reference import WorkloadRef

_LEAST_REQUESTS = 16  # of a run: fewer have no rate to speak of


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload at one rate, for so many seconds of arrivals."""

    workload: WorkloadRef
    rate_per_s: float
    seconds: float
    warm_share: float = 1 / 8  # of the requests the first only warm the caches; as in the simulator

    @property
    def num_requests(self) -> int:
        """Those that only warm the caches included."""
        return max(_LEAST_REQUESTS, round(self.rate_per_s * self.seconds))

    @property
    def num_warming(self) -> int:
        return round(self.num_requests * self.warm_share)


@dataclass(frozen=True, slots=True)
class Search:
    """Find the highest rate that keeps the targets.

    A server that has just met its sessions has none of their histories, whoever places them: a rate that can
    be held shows once most of them have been there. One late answer is more than one of a hundred in a try of
    fifty, and one moment in which a machine stands still makes several late: so enough have to count, and a
    rate that is missed is tried again before it is believed.
    """

    workload: WorkloadRef
    first_per_s: float
    seconds: float  # of each try, at least
    precision: float = 0.08
    warm_share: float = 0.5  # of each try
    least_counted: int = 200  # requests of each try: so long it lasts
    attempts: int = 2  # at a rate, until one keeps the targets

    def cell(self, rate_per_s: float) -> Cell:
        least_s = self.least_counted / (1.0 - self.warm_share) / rate_per_s
        return Cell(self.workload, rate_per_s, max(self.seconds, least_s), self.warm_share)


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
