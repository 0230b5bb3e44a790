"""Reading JSON lines strictly: an error names file, line and field. Knows no format of its own."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadtest.workloads.errors import TraceError

MAX_LINE_BYTES = (
    16 << 20
)  # a prompt of 126,000 tokens in 512-token blocks takes 2 KB; a runaway file stops here


class Line:
    """One JSON object of a file, asked for its fields one by one."""

    __slots__ = ("_fields", "number", "path")

    def __init__(self, path: Path, number: int, fields: dict[str, Any]) -> None:
        self.path = path
        self.number = number  # from 1
        self._fields = fields

    def error(self, field: str | None, problem: str) -> TraceError:
        return TraceError(self.path, self.number, field, problem)

    def check_fields(self, required: frozenset[str], optional: frozenset[str] = frozenset()) -> None:
        """Raises TraceError for a missing field, or one that is not known."""
        for name in sorted(required - self._fields.keys()):
            raise self.error(name, "is missing")
        for name in sorted(self._fields.keys() - required - optional):
            raise self.error(name, f"is not known; fields are {', '.join(sorted(required | optional))}")

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def integer(self, name: str, low: int, high: int) -> int:
        value = self._fields[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"must be an integer, not {_shown(value)}")
        self._check_range(name, value, low, high)
        return value

    def integers(self, name: str, low: int, high: int) -> list[int]:
        for value in (values := self.list_of(name)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise self.error(name, f"must list integers, not {_shown(value)}")
            self._check_range(name, value, low, high)
        return values

    def real(self, name: str, low: float, high: float) -> float:
        value = self._fields[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, f"must be a number, not {_shown(value)}")
        self._check_range(name, value, low, high)
        return float(value)

    def is_true(self, name: str) -> bool:
        return self._fields[name] is True

    def string(self, name: str) -> str:
        value = self._fields[name]
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, not {_shown(value)}")
        return value

    def list_of(self, name: str) -> list[Any]:
        value = self._fields[name]
        if not isinstance(value, list):
            raise self.error(name, f"must be a list, not {_shown(value)}")
        return value

    def _check_range(self, name: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:  # also refuses NaN, which Python's JSON lets through
            raise self.error(name, f"must be between {low:,} and {high:,}, not {value!r}")


def read_lines(path: Path) -> Iterator[Line]:
    """The file's objects, in order; `.gz` is unpacked. Blank lines are errors, but for a last one.

    Raises TraceError for a file that cannot be read and for a line that is not a JSON object.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                if len(raw) > MAX_LINE_BYTES:
                    raise TraceError(path, number, None, f"is longer than {MAX_LINE_BYTES:,} bytes")
                yield Line(path, number, _object(path, number, raw))
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(path, 0, None, f"cannot be read: {error}") from error


def _object(path: Path, number: int, raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        told = f"is not JSON: {error}"
        if not raw.endswith(b"\n"):
            told += " (it is the last and has no end, as in a copy made while it was written: leave it out)"
        raise TraceError(path, number, None, told) from error
    if not isinstance(value, dict):
        raise TraceError(path, number, None, f"must be an object, not {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:40] + "…"
