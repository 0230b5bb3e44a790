"""`make conformance`: one line per row, from the tests that hold it.

    python -m tests.conformance        runs tests/http/conformance and prints the table

A test names its row with `@row("...")`. Exit status 1 when a row's test fails or a row has no test. A row
whose behaviour is not implemented has a strict xfail for the behaviour, beside a passing test that it is
refused by name: its verdict is `refused`, or `missing` where there is nothing to refuse.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.conformance.rows import ROWS

SUITE = Path(__file__).parents[1] / "http" / "conformance"


@dataclass
class Tally:
    """What the tests of one row came to."""

    passed: int = 0
    missing: int = 0  # strict xfails: behaviour that is not there
    failed: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.failed:
            return "FAILED"
        if self.missing:
            return "refused" if self.passed else "missing"
        return "passed" if self.passed else "NO TEST"

    @property
    def is_broken(self) -> bool:
        return bool(self.failed) or not (self.passed or self.missing)


class Collector:
    """The pytest plugin: one report per test, added to its rows."""

    def __init__(self) -> None:
        self.tallies = {item: Tally() for item in ROWS}
        self._rows_of: dict[str, tuple[str, ...]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            function = getattr(item, "function", None)
            self._rows_of[item.nodeid] = getattr(function, "conformance_rows", ())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for item in self._rows_of.get(report.nodeid, ()):
            tally = self.tallies[item]
            if report.failed:
                tally.failed.append(report.nodeid)
            elif report.when == "call" or (report.when == "setup" and report.skipped):
                if hasattr(report, "wasxfail"):
                    tally.missing += 1
                elif report.passed:
                    tally.passed += 1


_STYLES = {
    "passed": "green",
    "refused": "yellow",
    "missing": "yellow",
    "FAILED": "bold red",
    "NO TEST": "bold red",
}


def table(tallies: dict[str, Tally]) -> Table:
    shown = Table(title="API conformance", title_justify="left")
    shown.add_column("item")
    shown.add_column("level")
    shown.add_column("verdict")
    shown.add_column("tests", justify="right")
    for item, level in ROWS.items():
        tally = tallies[item]
        style = _STYLES[tally.verdict]
        count = tally.passed + tally.missing + len(tally.failed)
        shown.add_row(item, level.value, f"[{style}]{tally.verdict}[/]", str(count))
    return shown


def main(arguments: list[str] | None = None) -> int:
    collector = Collector()
    options = ["-q", "--no-header", "-p", "no:cacheprovider", str(SUITE), *(arguments or [])]
    status = pytest.main(options, plugins=[collector])
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table(collector.tallies))
    broken = [item for item, tally in collector.tallies.items() if tally.is_broken]
    for item in broken:
        console.print(f"[bold red]{collector.tallies[item].verdict}[/]: {item}")
    return 1 if broken or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
