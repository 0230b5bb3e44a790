"""What was seen of requests and processes. Values that cross from a session's process to the report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from benchmarks.overhead.cells import Cell, Path
from benchmarks.overhead.modes import Mode


class Part(StrEnum):
    """Whose CPU time it is. The measuring client is nobody's, and Ray's own daemons are not counted."""

    PROXY = "proxy"  # HAProxy with its manager, or Serve's Python proxy
    ROUTER = "Router"
    REPLICA = "replica"  # all of them together


@dataclass(frozen=True, slots=True)
class Sample:
    """One request, as its client saw it."""

    first_s: float  # sent -> first token
    num_pieces: int  # server-sent events with content, or items of the handle's stream


@dataclass(frozen=True, slots=True)
class Run:
    """A cell's requests over one path, once."""

    mode: Mode
    cell: Cell
    path: Path
    samples: tuple[Sample, ...]
    wall_s: float
    cpu_s: dict[Part, float]


@dataclass(frozen=True, slots=True)
class Idle:
    """The same servers with nobody asking: CPU seconds per second."""

    mode: Mode
    cpu_share: dict[Part, float]


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """What of a prompt nobody has seen before takes to tokenize: seconds, the median."""

    prompt: str
    new_s: float
