"""A trace file of either format: whichever its first line is in. Knows formats by name only."""

from __future__ import annotations

from pathlib import Path

from loadtest.workloads.json_lines import read_lines
from loadtest.workloads.mooncake import read_mooncake
from loadtest.workloads.recording import read_recording
from loadtest.workloads.request import Workload


def read_trace(path: Path) -> Workload:
    """A recording if the file opens with a recording's header, else a Mooncake trace. Raises TraceError."""
    first = next(read_lines(path), None)
    return read_recording(path) if first is not None and "format" in first else read_mooncake(path)
