"""What can go wrong with a grid.

PlacementError
├── BadRequest        something asked for on the command line does not exist or makes no sense
│   └── NoPlots       plots, where what draws them is not installed
├── UnreadableResult  the file of a finished cell is damaged, or may not be read
├── NotKept           a finished cell cannot be written
├── NotWritten        a report cannot be written; what it says has been printed
├── CellsFailed       cells raised: which, and why; no table is made of the others
└── Stopped           Ctrl-C: finished cells are kept
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cache.counted import counted


class PlacementError(Exception):
    """The comparison cannot be made."""


class BadRequest(PlacementError):
    """The message says what is wrong and what there is instead."""


class NoPlots(BadRequest):
    """They are asked for, and what draws them is not installed."""

    def __init__(self, missing: str | None) -> None:
        super().__init__(f"plots need {missing}: pip install -e '.[loadtest]', or ask for --no-plots")


class UnreadableResult(PlacementError):
    """As good as no result; another takes its place."""

    def __init__(self, path: Path, why: str) -> None:
        self.path = path
        super().__init__(f"{path} cannot be read ({why}): its cell runs again")


class NotKept(PlacementError):
    """A result cannot be written; those before it are kept."""

    def __init__(self, path: Path, why: str) -> None:
        self.path = path
        super().__init__(
            f"a finished cell cannot be written to {path} ({why}): make room there, or name another folder "
            "with --results; the cells before it are kept, and the same command goes on from there"
        )


class NotWritten(PlacementError):
    def __init__(self, folder: Path, why: str) -> None:
        self.folder = folder
        super().__init__(
            f"the report cannot be written to {folder} ({why}): what is printed above is all there is of it"
        )


class CellsFailed(PlacementError):
    """Some cells have no result, so there is no table."""

    def __init__(self, failures: Sequence[tuple[str, str]], num_finished: int) -> None:
        """failures: (cell, its error), at least one."""
        self.failures = tuple(failures)
        self.num_finished = num_finished
        cell, error = self.failures[0]
        others = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
        super().__init__(
            f"no result for {cell}{others}; {counted(num_finished, 'finished cell')} kept.\n{error.rstrip()}"
        )


class Stopped(PlacementError):
    """Interrupted; the same command goes on where this one stopped."""

    def __init__(self, num_finished: int, num_cells: int) -> None:
        super().__init__(
            f"stopped: {num_finished} of {counted(num_cells, 'cell')} kept, the same command goes on "
            "from there"
        )
