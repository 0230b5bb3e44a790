"""What locust's own table has no column for: cached tokens, replicas, finish reasons, per scenario.

Plain sums, so that those of many workers add up. Knows answers; knows no locust.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from loadtest.client.answer import Answer

UNKNOWN = "not told"
_OF_ONE_REQUEST = re.compile(r"[\w.:/-]*\d[\w.:/-]*")  # ids, ports, counts: words with a digit
_NAMED_CHARS = 100
_OK = 200


@dataclass(slots=True)
class ScenarioCounts:
    """Of whole answers only, but for `failures`."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    counted_answers: int = 0  # those for which the server told both
    output_tokens: int = 0
    replicas: dict[str, int] = field(default_factory=dict)
    finish_reasons: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)  # by kind
    votes: int = 0
    agreement: float = 0.0  # sum over votes of the winner's share

    def add(self, answer: Answer) -> None:
        if answer.failure is not None:
            _count(self.failures, answer.failure.value)
            return
        self.answers += 1
        self.output_tokens += answer.output_tokens or 0
        _count(self.replicas, answer.replica or UNKNOWN)
        for reason in answer.finish_reasons:
            _count(self.finish_reasons, reason or UNKNOWN)
        if answer.prompt_tokens is not None and answer.cached_tokens is not None:
            self.counted_answers += 1
            self.prompt_tokens += answer.prompt_tokens
            self.cached_tokens += answer.cached_tokens

    def merge(self, other: ScenarioCounts) -> None:
        self.answers += other.answers
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.counted_answers += other.counted_answers
        self.output_tokens += other.output_tokens
        for ours, theirs in (
            (self.replicas, other.replicas),
            (self.finish_reasons, other.finish_reasons),
            (self.failures, other.failures),
        ):
            for key, number in theirs.items():
                _count(ours, key, number)
        self.votes += other.votes
        self.agreement += other.agreement

    @property
    def hit_ratio(self) -> float | None:
        """Cached over prompt tokens; None where the server did not tell."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


class Counts:
    """By scenario. One process's, or the sum of several."""

    def __init__(self) -> None:
        self.by_scenario: dict[str, ScenarioCounts] = {}

    def of(self, scenario: str) -> ScenarioCounts:
        return self.by_scenario.setdefault(scenario, ScenarioCounts())

    def take(self) -> dict[str, Any]:
        """All of it as plain values, and begin anew: what a worker sends."""
        taken: dict[str, Any] = msgspec.to_builtins(self.by_scenario)
        self.by_scenario = {}
        return taken

    def merge(self, taken: Mapping[str, Any]) -> None:
        """Add what `take` gave elsewhere."""
        for scenario, counts in taken.items():
            self.of(scenario).merge(msgspec.convert(counts, ScenarioCounts))

    def lines(self) -> list[str]:
        """A table, as text."""
        head = (
            f"{'scenario':<20}{'answers':>9}{'failed':>8}{'hit rate':>10}{'tokens out':>12}  replicas, ends"
        )
        return [head, *(_line(name, counts) for name, counts in sorted(self.by_scenario.items()))]


def failure_name(answer: Answer) -> str:
    """What to call a failure where equal ones are counted together: without what differs from one to the
    next, and without the end of a long message, which may have been cut anywhere."""
    assert answer.failure is not None
    status = "" if answer.status in (None, _OK) else f" ({answer.status})"
    said = re.search(r'"message": ?"([^"]*)', answer.problem)
    problem = said[1] if said else answer.problem
    named = _OF_ONE_REQUEST.sub("…", " ".join(problem.split()))
    if len(named) > _NAMED_CHARS:
        named = f"{named[:_NAMED_CHARS]}…"
    return f"{answer.failure}{status}" + (f": {named}" if named else "")


def _line(name: str, counts: ScenarioCounts) -> str:
    hits = "" if counts.hit_ratio is None else f"{100 * counts.hit_ratio:.1f} %"
    parts = [_shares(counts.replicas), _shares(counts.finish_reasons)]
    if counts.votes:
        parts.append(f"winners have {100 * counts.agreement / counts.votes:.0f} % of the votes")
    parts.append(_shares(counts.failures))
    told = "; ".join(part for part in parts if part)
    failed = sum(counts.failures.values())
    return f"{name:<20}{counts.answers:>9}{failed:>8}{hits:>10}{counts.output_tokens:>12}  {told}"


def _count(numbers: dict[str, int], key: str, number: int = 1) -> None:
    numbers[key] = numbers.get(key, 0) + number


def _shares(numbers: Mapping[str, int]) -> str:
    """The largest six."""
    largest = sorted(numbers.items(), key=lambda entry: (-entry[1], entry[0]))[:6]
    return ", ".join(f"{name} {number}" for name, number in largest)
