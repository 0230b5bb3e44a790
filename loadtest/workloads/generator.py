"""What every kind of synthetic traffic is made of: sessions of turns, drawn from a seed.

A generator is a frozen set of parameters; `sessions` turns it into endless sessions, and
`generator_source.py` lays them over each other at the rate asked for. Gaps inside a session do not depend on
the rate. Knows lengths, times and block ids; knows no engine, and no generator by name.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import ClassVar, NamedTuple, Protocol

from loadtest.workloads.conversation import BlockIds, Conversation, SharedText, length, shared_text
from loadtest.workloads.errors import WorkloadError

BLOCK_TOKENS = 64  # finer than published traces: a chat's messages are shorter than their 512


class Turn(NamedTuple):
    """One request of a session."""

    after_s: float  # seconds since the session's request before it; 0 for the first
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


Session = Iterator[Turn]


class Generator(Protocol):
    """Parameters of one kind of traffic."""

    name: ClassVar[str]

    @property
    def requests_per_session(self) -> float:
        """The mean, near enough to start a search for a rate."""

    @property
    def session_s(self) -> float:
        """Most sessions are over after so long; traffic is stationary that much later than it began."""

    def sessions(self, rng: random.Random, ids: BlockIds) -> Iterator[Session]:
        """Sessions without end. What they share is drawn first, so that a seed fixes it."""


def at_least(generator: object, low: float, *names: str) -> None:
    """Raises WorkloadError for a parameter below `low`."""
    for name in names:
        value = getattr(generator, name)
        if not value >= low:
            raise WorkloadError(f"{type(generator).__name__}: {name} = {value:g} is below {low:g}")


def own_draws(rng: random.Random) -> random.Random:
    """One session's own draws, so that it is the same at every rate, however sessions interleave."""
    return random.Random(rng.getrandbits(64))


def openings(
    rng: random.Random, ids: BlockIds, how_many: int, median_tokens: float, *, spread: float
) -> list[SharedText]:
    """Openings that many sessions share, of lengths around the median."""
    return [shared_text(ids, BLOCK_TOKENS, length(rng, median_tokens, spread)) for _ in range(how_many)]


def single(
    rng: random.Random,
    ids: BlockIds,
    opening: SharedText | None,
    question_tokens: float,
    answer_tokens: float,
    *,
    after_s: float = 0.0,
) -> Session:
    """One question behind an opening, and no second."""
    prompt = Conversation(ids, BLOCK_TOKENS, opening)
    prompt.say(length(rng, question_tokens, 0.9))
    yield Turn(after_s, prompt.tokens, length(rng, answer_tokens, 0.7), prompt.prompt())
