"""The name of a workload: small, hashable, the same in every process; and how to get from it to requests.

A cell of the grid carries a reference, not thousands of requests. Knows sources by name; knows neither loads
nor engines.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from loadtest.workloads.errors import TraceError, WorkloadError
from loadtest.workloads.generator_source import GeneratorSource
from loadtest.workloads.generators import GENERATORS, make_generator
from loadtest.workloads.load import Source
from loadtest.workloads.request import Workload
from loadtest.workloads.ticks import spread_over_ticks
from loadtest.workloads.trace_source import TraceSource
from loadtest.workloads.traces import read_trace

DEFAULT_REQUESTS = 3_500  # a window: long enough for a cache to fill and turn over, short enough for a grid


@dataclass(frozen=True, slots=True)
class WorkloadRef:
    """A window of a trace file, or of a generator with its parameters."""

    source: str  # a generator's name, or the path of a trace
    parameters: tuple[tuple[str, float], ...] = ()  # of a generator: those that differ from its defaults
    num_requests: int = DEFAULT_REQUESTS  # in the window, those that only warm the caches included
    spread_ticks: bool = False  # of a trace: its arrivals as `ticks.py` spreads them, not as published
    digest: str = ""  # of the trace file as it was first seen: who reads another later refuses it; "" = any

    def __post_init__(self) -> None:
        if self.num_requests < 2:
            raise ValueError(f"num_requests = {self.num_requests} is less than 2, so it has no rate")
        if self.spread_ticks and self.is_generated:
            raise ValueError(f"{self.source!r} has no ticks to spread: its arrivals are drawn")

    @classmethod
    def of_file(cls, path: Path) -> WorkloadRef:
        """A trace, also where its file has a generator's name."""
        return cls(str(path) if str(path) not in GENERATORS else f"./{path}")

    @property
    def is_generated(self) -> bool:
        return self.source in GENERATORS

    @property
    def label(self) -> str:
        """Short, for tables."""
        name = self.source if self.is_generated else Path(self.source).name.split(".")[0]
        if self.spread_ticks:
            name += " (spread)"
        knobs = ",".join(f"{key}={value:g}" for key, value in self.parameters)
        return f"{name}:{knobs}" if knobs else name

    def open(self) -> Source:
        """Where its windows come from; a trace is read once per process. Raises WorkloadError."""
        if self.is_generated:
            return GeneratorSource(make_generator(self.source, dict(self.parameters)))
        return _source(replace(self, num_requests=DEFAULT_REQUESTS))

    def trace(self) -> Workload:
        """All of it, as it came. Raises WorkloadError; a generator has no end."""
        if self.is_generated:
            raise WorkloadError(f"{self.source} is a generator, not a trace")
        whole = read_trace(Path(self.source))
        if self.digest and self.content_digest() != self.digest:
            raise TraceError(
                self.source,
                0,
                None,
                "changes while it is simulated, as a recording that goes on does: copy it",
            )
        return spread_over_ticks(whole) if self.spread_ticks else whole

    def as_it_is(self) -> WorkloadRef:
        """The same, for several processes that are to read one content. Raises WorkloadError."""
        return replace(self, digest=self.content_digest())

    def content_digest(self) -> str:
        """Changes exactly when the trace file does; a generator's content is its name and parameters.

        Raises WorkloadError for a file that cannot be read.
        """
        if self.is_generated:
            return ""
        try:
            with open(self.source, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise TraceError(self.source, 0, None, f"cannot be read: {error}") from error


@lru_cache(maxsize=4)
def _source(reference: WorkloadRef) -> TraceSource:
    return TraceSource(reference.trace())
