"""What is asked, how often and how many at a time. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ONE_TOKEN, STREAM_TOKENS = 1, 100


class Prompt(StrEnum):
    """Length of the prompts. Every one ends in a question nobody has asked before."""

    SMALL = "small"  # one short message
    LONG = "8k"  # the next turn of a conversation of 8,192 tokens, the turns before it seen by everybody


class Path(StrEnum):
    """How a request reaches a replica."""

    DIRECT = "direct"  # a Serve handle, from the process that measures
    HTTP = "http"  # client, proxy, Router, then the same handle call


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the result: so many requests of one kind, so many of them at a time."""

    prompt: Prompt
    concurrency: int
    output_tokens: int  # 1: a request; 100: a stream

    @property
    def label(self) -> str:
        kind = "requests" if self.output_tokens == ONE_TOKEN else f"{self.output_tokens}-token streams"
        return f"{self.prompt} prompts, {kind}, {self.concurrency} at a time"


@dataclass(frozen=True, slots=True)
class Plan:
    """One mode's cells. Both paths take turns within every repeat."""

    cells: tuple[Cell, ...]
    repeats: int
    requests: int  # of one token, in a run, at concurrency 1; others make more
    streams: int  # of 100 tokens, the same
    idle_s: float  # how long the idle servers are watched

    def num_requests(self, cell: Cell) -> int:
        """In one run: enough for a median at concurrency 1, two whole waves at the others."""
        alone = self.requests if cell.output_tokens == ONE_TOKEN else self.streams
        waves = 4 if cell.output_tokens == ONE_TOKEN else 2
        return max(alone, waves * cell.concurrency if cell.concurrency > 1 else alone)


def cells_of(prompts: tuple[Prompt, ...], concurrencies: tuple[int, ...]) -> tuple[Cell, ...]:
    """Every combination, in the order of the table."""
    return tuple(
        Cell(prompt, concurrency, tokens)
        for prompt in prompts
        for concurrency in concurrencies
        for tokens in (ONE_TOKEN, STREAM_TOKENS)
    )
