"""`make conformance`: one line per row, from the tests that hold it.

    python -m tests.conformance                  runs tests/http/conformance and prints the table
    python -m tests.conformance deadline stop    the rows with that name, or with that in their names
    python -m tests.conformance -k stream -x     those whose tests pytest chooses: all behind a dash is its

A test names its row with `@row("...")`. Exit status 1 when a row's test fails or a row has no test, 2 when
there is no such row. A row whose behaviour is not implemented has a strict xfail for the behaviour, beside
a passing test that it is refused by name: its verdict is `refused`, or `missing` where there is nothing to
refuse.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.conformance.rows import ROWS

USAGE = 2  # exit status, as argparse has it
_HELP = ("-h", "--help")
SUITE = Path(__file__).parents[1] / "http" / "conformance"


@dataclass
class Tally:
    """What the tests of one row came to."""

    chosen: int = 0
    left_out: int = 0  # by pytest's own options
    passed: int = 0
    missing: int = 0  # strict xfails: behaviour that is not there
    failed: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.failed:
            return "FAILED"
        if self.missing:
            return "refused" if self.passed else "missing"
        if self.passed:
            return "passed"
        return "NOT RUN" if self.chosen else "NO TEST"

    @property
    def is_asked(self) -> bool:
        """Whether it belongs in the table: pytest's options have left some of its tests, if it has any."""
        return self.chosen > 0 or not self.left_out

    @property
    def is_broken(self) -> bool:
        return bool(self.failed) or not (self.passed or self.missing)


class Collector:
    """The pytest plugin: one report per test, added to its rows."""

    def __init__(self, rows: Iterable[str]) -> None:
        """rows: that are asked for; the tests of others are not run."""
        self._by_row = {item: Tally() for item in rows}
        self._rows_of: dict[str, tuple[str, ...]] = {}

    @property
    def tallies(self) -> dict[str, Tally]:
        """Of the rows that were asked for, also by pytest's options."""
        return {item: tally for item, tally in self._by_row.items() if tally.is_asked}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Before pytest's own options leave some out: a row is not without tests for that."""
        for item in items:
            rows = getattr(getattr(item, "function", None), "conformance_rows", ())
            self._rows_of[item.nodeid] = tuple(each for each in rows if each in self._by_row)
            for each in self._rows_of[item.nodeid]:
                self._by_row[each].chosen += 1
        if len(self._by_row) < len(ROWS):
            others = [item for item in items if not self._rows_of[item.nodeid]]
            items[:] = [item for item in items if self._rows_of[item.nodeid]]
            config.hook.pytest_deselected(items=others)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            for each in self._rows_of[item.nodeid]:
                self._by_row[each].chosen -= 1
                self._by_row[each].left_out += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for item in self._rows_of.get(report.nodeid, ()):
            tally = self._by_row[item]
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
    "NOT RUN": "bold red",
    "NO TEST": "bold red",
}


def table(tallies: dict[str, Tally]) -> Table:
    shown = Table(title="API conformance", title_justify="left")
    shown.add_column("item")
    shown.add_column("level")
    shown.add_column("verdict")
    shown.add_column("tests", justify="right")
    for item, tally in tallies.items():
        style = _STYLES[tally.verdict]
        count = tally.passed + tally.missing + len(tally.failed)
        shown.add_row(item, ROWS[item].value, f"[{style}]{tally.verdict}[/]", str(count))
    return shown


def rows_named(words: Sequence[str]) -> list[str]:
    """The rows of that name, or else with that in their names, in the table's order; all if no word is given.

    Raises LookupError for a word that no row matches.
    """
    if not words:
        return list(ROWS)
    found: set[str] = set()
    for word in words:
        sought = word.casefold()
        matching = {item for item in ROWS if item.casefold() == sought}
        matching = matching or {item for item in ROWS if sought in item.casefold()}
        if not matching:
            raise LookupError(no_row_matches(word))
        found |= matching
    return [item for item in ROWS if item in found]


def no_row_matches(asked: str) -> str:
    return f"no row matches {asked!r}; there are: {'; '.join(ROWS)}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        usage="%(prog)s [-h] [row ...] [pytest's options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("row", nargs="*", help="a row's name, or some of it; default: all")
    given = list(sys.argv[1:] if argv is None else argv)
    count = next(
        (at for at, each in enumerate(given) if each.startswith("-") and each not in _HELP), len(given)
    )
    words, options = given[:count], given[count:]
    try:
        collector = Collector(rows_named(parser.parse_args(words).row))
    except LookupError as error:
        parser.error(str(error.args[0]))
    status = pytest.main(
        ["-q", "--no-header", "-p", "no:cacheprovider", str(SUITE), *options], plugins=[collector]
    )
    if status == pytest.ExitCode.USAGE_ERROR:  # pytest has said it
        return USAGE
    tallies = collector.tallies
    if not tallies:
        parser.error(no_row_matches(" ".join(given)))
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table(tallies))
    broken = [item for item, tally in tallies.items() if tally.is_broken]
    for item in broken:
        console.print(f"[bold red]{tallies[item].verdict}[/]: {item}")
    return 1 if broken or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else int(status)


if __name__ == "__main__":
    sys.exit(main())
