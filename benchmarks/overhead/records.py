"""What a run has seen so far, kept in a file: a run that was cut off goes on where it ends.

One JSON array a line: the conditions it was begun under, then [kind, content] as sessions tell them. Knows
what belongs to which cell; knows neither servers nor tables.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, TextIO

import msgspec

from benchmarks.overhead.cells import Cell, Path, Plan
from benchmarks.overhead.modes import Mode
from benchmarks.overhead.samples import Idle, Run, Tokenizing

_CONDITIONS = "conditions"


class OtherConditions(ValueError):
    """The file was begun under other conditions than this run's: their numbers do not belong in one table."""

    def __init__(self, path: FilePath, differing: Sequence[str]) -> None:
        self.differing = tuple(differing)
        super().__init__(f"{path} was begun with another {', '.join(differing)}")


@dataclass(slots=True)
class Records:
    """Everything seen; whole cells only, of what an earlier run has left."""

    runs: list[Run] = field(default_factory=list)
    idle: list[Idle] = field(default_factory=list)
    tokenizing: list[Tokenizing] = field(default_factory=list)
    _out: TextIO | None = None

    @classmethod
    def open(cls, path: FilePath | None, conditions: dict[str, Any], plan: Plan) -> Records:
        """path: None keeps nothing. Raises OtherConditions, and ValueError for a file that is not of ours."""
        records = cls()
        if path is None:
            return records
        if path.exists() and path.stat().st_size:
            records._read(path, conditions, plan)
        # Anew, and without the cell it was cut off in; the old file stays until the new one is whole.
        begun = path.with_name(f"{path.name}.new")
        records._out = begun.open("w")
        records._write_all(conditions)
        begun.replace(path)
        return records

    def add(self, kind: str, content: Any) -> Run | Idle | Tokenizing:
        """Keep one thing that a session has told. Raises KeyError for a kind that is none of these."""
        seen = self._take(kind, content)
        self._write(kind, content)
        return seen

    def left(self, mode: Mode, plan: Plan) -> tuple[Cell, ...]:
        """The plan's cells that this mode has not been asked in whole."""
        return tuple(cell for cell in plan.cells if (mode, cell) not in self._whole(plan))

    def close(self) -> None:
        """Idempotent."""
        if self._out is not None:
            self._out.close()
            self._out = None

    def _take(self, kind: str, content: Any) -> Run | Idle | Tokenizing:
        match kind:
            case "run":
                self.runs.append(run := msgspec.convert(content, Run))
                return run
            case "idle":
                self.idle.append(idle := msgspec.convert(content, Idle))
                return idle
            case "tokenizing":
                self.tokenizing.append(tokenizing := msgspec.convert(content, Tokenizing))
                return tokenizing
        raise KeyError(kind)

    def _read(self, path: FilePath, conditions: dict[str, Any], plan: Plan) -> None:
        # A line that was cut off has no end.
        lines = path.read_text().splitlines(keepends=True)
        (kind, begun), *rest = (json.loads(line) for line in lines if line.endswith("\n"))
        if kind != _CONDITIONS:
            raise ValueError(f"{path} is no file of this benchmark")
        if differing := [name for name in conditions if begun.get(name) != conditions[name]]:
            raise OtherConditions(path, differing)
        for kind, content in rest:
            self._take(kind, content)
        whole = self._whole(plan)  # of the cell it was cut off in, nothing: it is asked again
        self.runs = [run for run in self.runs if (run.mode, run.cell) in whole]

    def _whole(self, plan: Plan) -> set[tuple[Mode, Cell]]:
        seen = Counter((run.mode, run.cell) for run in self.runs)
        return {key for key, count in seen.items() if count >= plan.repeats * len(Path)}

    def _write_all(self, conditions: dict[str, Any]) -> None:
        self._write(_CONDITIONS, conditions)
        seen: dict[str, Sequence[Run | Idle | Tokenizing]]
        seen = {"run": self.runs, "idle": self.idle, "tokenizing": self.tokenizing}
        for kind, things in seen.items():
            for thing in things:
                self._write(kind, msgspec.to_builtins(thing))

    def _write(self, kind: str, content: Any) -> None:
        if self._out is not None:
            self._out.write(json.dumps([kind, content]) + "\n")
            self._out.flush()
