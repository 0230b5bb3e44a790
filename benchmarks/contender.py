"""What a contender is: prompts that come together, answered and timed. The contract that all of them keep."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Protocol

from benchmarks.spans import NO_TIME, Span

OURS, GENERATE, CONTINUOUS = "warmpath", "generate", "continuous"
NAMES = (OURS, GENERATE, CONTINUOUS)


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts that arrive together; all get exactly `output_tokens`."""

    prompts: tuple[array[int], ...]
    output_tokens: int
    prefix_caching: bool = True  # ours only
    is_cold: bool = True  # ours only: start with an empty cache


@dataclass(frozen=True, slots=True)
class Run:
    """One job, timed."""

    outputs: tuple[tuple[int, ...], ...]
    whole: Span  # submission to the last token
    first_tokens: Span  # submission until every sequence has its first token
    steps: tuple[Span, ...]  # steps in which every sequence decoded: the steady state
    every_step: tuple[Span, ...] = ()  # ours only: all of them, the first with the submission
    cached_tokens: int = 0  # of all prompts
    host: Span = NO_TIME  # ours only: the part of `whole` outside the runner
    peak_bytes: int = 0  # set by the worker: most memory held, above the loaded model


class Contender(Protocol):
    """Loads when built; `run` may be called any number of times."""

    def run(self, job: Job) -> Run: ...
