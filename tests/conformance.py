"""The rows of API conformance, and `make conformance`: one line per row, from the tests that hold it.

    python -m tests.conformance        runs tests/e2e/test_conformance.py and prints the table

A test names its row with `@row("...")`. Exit status 1 when a row's test fails or a row has no test. A row
whose behaviour is not implemented has a strict xfail for the behaviour, beside a passing test that it is
refused by name: its verdict is `refused`, or `missing` where there is nothing to refuse.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import pytest
from rich.console import Console
from rich.table import Table

SUITE = Path(__file__).parent / "e2e" / "test_conformance.py"


class Level(StrEnum):
    MUST = "MUST"  # a client or benchmark in use breaks or mis-measures without it
    SHOULD = "SHOULD"
    NICE = "NICE"


_MUST = (
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "GET /v1/models and /v1/models/{id}, with max_model_len",
    "GET /health and /live",
    "GET /metrics on the serving port",
    "prompt: a string",
    "prompt: token ids",
    "content as a list of text parts",
    "max_tokens and max_completion_tokens",
    "temperature",
    "top_p",
    "stop",
    "seed",
    "ignore_eos",
    "stream, [DONE], one finish_reason",
    "no chunk before the first token is computed",
    "stream_options.include_usage",
    "usage.prompt_tokens_details.cached_tokens",
    "cache_salt",
    "unknown fields are accepted and counted",
    "x-request-id in and out",
    "one error object on every path",
    "400 malformed JSON, deep nesting, bad UTF-8",
    "404 unknown model",
    "401 bad key",
    "413 body too large",
    "429 and 503 with Retry-After",
    "504 deadline",
    "499 client gone",
)
_SHOULD = (
    "POST /tokenize and /detokenize",
    "GET /version",
    "prompt: a list of strings",
    "prompt: a list of lists of token ids",
    "n > 1",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "stop_token_ids",
    "logprobs (completions)",
    "logprobs and top_logprobs (chat)",
    "stream_options.continuous_usage_stats",
    "prompt_cache_key is a hint",
    "session header",
    "routing headers behind a switch",
    "response_format",
    "tools and tool_choice",
)
_NICE = (
    "echo, suffix, best_of",
    "logit_bias",
    "structured_outputs",
    "priority",
    "/v1/embeddings and other routes: 404, not 500",
    "/openapi.json",
)
ROWS: dict[str, Level] = {
    **dict.fromkeys(_MUST, Level.MUST),
    **dict.fromkeys(_SHOULD, Level.SHOULD),
    **dict.fromkeys(_NICE, Level.NICE),
}

_Test = TypeVar("_Test", bound=Callable[..., object])


def row(*items: str) -> Callable[[_Test], _Test]:
    """Says which rows a test holds. Raises KeyError for a row that is not in the table."""
    for item in items:
        ROWS[item]

    def mark(test: _Test) -> _Test:
        test.__dict__["conformance_rows"] = items
        return test

    return mark


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
