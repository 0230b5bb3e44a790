"""Cells that were measured, kept in a file: a run that was cut off goes on where it ends.

One JSON object a line: the conditions it was begun under, then the rows of a model's cell, whole cells only.
Knows rows; knows neither plans nor engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import Row


class OtherConditions(ValueError):
    """The file was begun under other conditions than this run's: their numbers do not belong in one table."""

    def __init__(self, path: Path, differing: Sequence[str]) -> None:
        self.differing = tuple(differing)
        super().__init__(f"{path} was begun with another {', '.join(differing)}")


class KeptCells:
    """What is known of each (model, cell). Without a file nothing is kept beyond this run."""

    def __init__(self, path: Path | None, conditions: Mapping[str, Any]) -> None:
        """Raises OtherConditions, and ValueError for a file that is not of ours."""
        self._path = path
        self._rows: dict[tuple[str, str], list[Row]] = {}
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            self._read(path, conditions)
        else:
            path.write_text(json.dumps({"conditions": dict(conditions)}) + "\n")

    def rows(self, model: str, cell: str) -> list[Row] | None:
        """None where it has not been measured."""
        return self._rows.get((model, cell))

    def keep(self, model: str, cell: str, rows: Sequence[Row]) -> None:
        self._rows[model, cell] = list(rows)
        if self._path is not None:
            line = {"model": model, "cell": cell, "rows": [row.to_json() for row in rows]}
            with self._path.open("a") as out:
                out.write(json.dumps(line) + "\n")

    def _read(self, path: Path, conditions: Mapping[str, Any]) -> None:
        text = path.read_text()
        whole = text[: text.rfind("\n") + 1]  # the last line may have been cut off
        try:
            first, *lines = map(json.loads, whole.splitlines())
            begun = first["conditions"]
            found = {
                (line["model"], line["cell"]): [Row.from_json(row) for row in line["rows"]] for line in lines
            }
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a file that --resume has made: {error}") from error
        differing = [key for key in conditions if begun.get(key) != conditions[key]]
        if differing:
            raise OtherConditions(path, differing)
        self._rows = found
        if whole != text:
            path.write_text(whole)
