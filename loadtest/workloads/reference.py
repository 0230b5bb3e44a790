"""The name of a workload: small, hashable, the same in every process; and how to get from it to requests.

A cell of the grid carries a reference, not thousands of requests. Knows sources by name; knows neither loads
nor engines.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from loadtest.workloads.generators import GENERATORS, GeneratorSource, make_generator
from loadtest.workloads.load import Source
from loadtest.workloads.trace_source import TraceSource
from loadtest.workloads.traces import read_trace

DEFAULT_REQUESTS = 3_500  # a window: long enough for a cache to fill and turn over, short enough for a grid


@dataclass(frozen=True, slots=True)
class WorkloadRef:
    """A window of a trace file, or of a generator with its parameters."""

    source: str  # a generator's name, or the path of a trace
    parameters: tuple[tuple[str, float], ...] = ()  # of a generator: those that differ from its defaults
    num_requests: int = DEFAULT_REQUESTS  # in the window, those that only warm the caches included

    def __post_init__(self) -> None:
        if self.num_requests < 2:
            raise ValueError(f"num_requests = {self.num_requests} is less than 2, so it has no rate")

    @property
    def is_generated(self) -> bool:
        return self.source in GENERATORS

    @property
    def label(self) -> str:
        """Short, for tables."""
        name = self.source if self.is_generated else Path(self.source).name.split(".")[0]
        knobs = ",".join(f"{key}={value:g}" for key, value in self.parameters)
        return f"{name}:{knobs}" if knobs else name

    def open(self) -> Source:
        """Where its windows come from; a trace is read once per process. Raises WorkloadError."""
        if self.is_generated:
            return GeneratorSource(make_generator(self.source, dict(self.parameters)))
        return _trace(Path(self.source))

    def content_digest(self) -> str:
        """Changes exactly when the trace file does; a generator's content is its name and parameters."""
        if self.is_generated:
            return ""
        return hashlib.sha256(Path(self.source).read_bytes()).hexdigest()


@lru_cache(maxsize=4)
def _trace(path: Path) -> TraceSource:
    return TraceSource(read_trace(path))
