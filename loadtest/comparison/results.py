"""What was measured, as values and as a file: everything that the report is made of.

Knows no report. A file written by one version is read by the same version only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from loadtest.comparison.errors import BrokenAnswers, ComparisonError
from loadtest.open_loop.tally import Tally, Targets
from loadtest.report_folder import write_whole

VERSION = 1


@dataclass(frozen=True, slots=True)
class Run:
    """One contender, one workload, one rate, one seed."""

    contender: str
    workload: str
    rate_per_s: float  # asked for
    repeat: int  # from 0
    seed: int
    kind: Literal["fixed", "search"]
    ceiling: float  # hit ratio of an infinite cache on the counted requests
    tally: Tally
    is_whole: bool = True  # False: stopped before its last request
    was_stopped: bool = False  # by Ctrl-C, and not because its targets were lost


@dataclass(frozen=True, slots=True)
class Found:
    """The highest rate that kept the targets in one search; 0 if none did."""

    contender: str
    workload: str
    repeat: int
    rate_per_s: float


@dataclass(frozen=True, slots=True)
class Results:
    conditions: dict[str, str]  # machine, versions, command, date
    contenders: tuple[str, ...]  # in the order asked for; the first is what others are held against
    engines: dict[str, str]  # contender: what ran its models
    targets: Targets
    runs: tuple[Run, ...] = ()
    found: tuple[Found, ...] = ()
    was_stopped: bool = False
    ended_by: str = ""  # the error that ended it before its end
    version: int = field(default=VERSION)

    @property
    def workloads(self) -> tuple[str, ...]:
        """In order of first sight."""
        return tuple(dict.fromkeys(run.workload for run in self.runs))

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of what was measured, ascending."""
        return tuple(sorted({run.seed for run in self.runs}))

    @property
    def num_repeats(self) -> int:
        """Of which something is whole, if anything is."""
        whole = {run.repeat for run in self.runs if run.is_whole} | {found.repeat for found in self.found}
        return len(whole or {run.repeat for run in self.runs})

    def fixed(self, contender: str, workload: str, rate_per_s: float) -> list[Run]:
        """Whole runs at one rate, by repeat."""
        return [run for run in self._at(contender, workload, rate_per_s) if run.is_whole]

    def shown(self, contender: str, workload: str, rate_per_s: float) -> list[Run]:
        """The same; where there is none, what was cut short."""
        return self.fixed(contender, workload, rate_per_s) or self._at(contender, workload, rate_per_s)

    @property
    def cut_short(self) -> Run | None:
        """What was on its way when it was stopped; None if nothing was, or nothing of it was answered."""
        return next((run for run in self.runs if run.was_stopped), None)

    def _at(self, contender: str, workload: str, rate_per_s: float) -> list[Run]:
        runs = [
            run
            for run in self.runs
            if run.kind == "fixed"
            and (run.contender, run.workload, run.rate_per_s) == (contender, workload, rate_per_s)
        ]
        return sorted(runs, key=lambda run: run.repeat)

    def require_whole_answers(self) -> None:
        """Of the rates that were asked for: those of a search are raised until answers fail.

        Raises BrokenAnswers, which names what failed of whom; being refused as busy is no failure.
        """
        tallies = [(run.contender, run.tally) for run in self.runs if run.kind == "fixed"]
        broken: Counter[tuple[str, str]] = Counter()
        said: dict[tuple[str, str], str] = {}
        for contender, tally in tallies:
            for kind, number in tally.broken.items():
                broken[contender, kind] += number
                said.setdefault((contender, kind), " | ".join(tally.problems.get(kind, ())[:2]))
        if broken:
            told = [f"{who}, {number} {kind}: {said[who, kind]}" for (who, kind), number in broken.items()]
            raise BrokenAnswers(broken.total(), sum(tally.num_sent for _, tally in tallies), "; ".join(told))

    def rates(self, workload: str) -> list[float]:
        """Fixed rates that were run, ascending."""
        return sorted(
            {run.rate_per_s for run in self.runs if run.workload == workload and run.kind == "fixed"}
        )


def write(path: Path, results: Results) -> None:
    """Whole or not at all."""
    write_whole(path, msgspec.json.encode(results))


def read(path: Path) -> Results:
    """Raises ComparisonError for a file that is none, or of another version."""
    try:
        content: Any = msgspec.json.decode(path.read_bytes())
        if not isinstance(content, dict) or content.get("version") != VERSION:
            raise ComparisonError(f"{path} holds no results of version {VERSION}")
        # JSON's keys are strings; the histograms' are numbers.
        return msgspec.convert(content, Results, strict=False)
    except (OSError, msgspec.MsgspecError) as error:
        raise ComparisonError(f"{path} cannot be read: {error}") from error


def merged(runs: Sequence[Run]) -> Tally:
    """The distributions and sums of several runs together; without what went over time."""
    total = Tally(targets=runs[0].tally.targets)
    for run in runs:
        one = run.tally
        for name in ("due", "answers", "good", "prompt_tokens", "cached_tokens", "output_tokens", "untold"):
            setattr(total, name, getattr(total, name) + getattr(one, name))
        total.counted_s += one.counted_s
        for name in ("ttft", "gaps", "tpot", "took", "late"):
            getattr(total, name).merge(getattr(one, name))
        for kind, number in one.failures.items():
            total.failures[kind] = total.failures.get(kind, 0) + number
    return total
