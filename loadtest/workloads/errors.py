"""What can be wrong with a workload asked for.

WorkloadError
├── TraceError         a trace file cannot be read: names file, line and field
└── UnknownName        no such generator or parameter: lists those there are
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class WorkloadError(Exception):
    """The workload asked for cannot be had."""


class TraceError(WorkloadError):
    """One line of a trace file says something that cannot be true."""

    def __init__(self, path: Path | str, line: int, field: str | None, problem: str) -> None:
        """line: counted from 1; 0 for the file as a whole. field: None for the line as a whole."""
        self.path = str(path)
        self.line = line
        self.field = field
        self.problem = problem
        where = f"{path}, line {line}" if line else f"{path}"
        super().__init__(f"{where}, field {field!r}: {problem}" if field else f"{where}: {problem}")


class UnknownName(WorkloadError):
    """A name that stands for nothing, with the names that would."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        self.known = tuple(sorted(known))
        super().__init__(f"unknown {kind} {name!r}; there are: {', '.join(self.known)}")
