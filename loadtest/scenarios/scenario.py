"""A scenario: sessions of one kind, each a script that yields what to ask and is sent the answers.

    answers = yield Ask((question, ...))     all of them at once; one answer each, in order
    yield Pause(seconds)                     a person thinks, or a tool runs

So the same script runs under locust, in a test against a made-up model, or against an infinite cache. Knows
questions and answers; knows neither transport nor clocks.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from loadtest.client.answer import Answer
from loadtest.client.question import Message, Question, chat


@dataclass(frozen=True, slots=True)
class Ask:
    questions: tuple[Question, ...]
    may_refuse: bool = False  # an answer 4xx is one of the things that may happen: no failure


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


Step = Ask | Pause
Script = Generator[Step, Sequence[Answer], None]


class Scenario(Protocol):
    """Parameters of one kind of session. Instances are shared by all users of a process."""

    name: ClassVar[str]

    def session(self, rng: random.Random, session_id: str) -> Script:
        """One session from its first question to its last. Equal draws and equal answers, equal questions.

        A script that gets a failed answer ends: nobody goes on from an answer they did not get.
        """


class Stopped(Exception):
    """A session ends early: an answer failed."""


def ask(*questions: Question) -> Generator[Step, Sequence[Answer], Sequence[Answer]]:
    """`answers = yield from ask(...)`. Raises Stopped if any of them failed."""
    answers = yield Ask(questions)
    if not all(answer.is_ok for answer in answers):
        raise Stopped
    return answers


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def question(
    messages: Sequence[Message],
    max_tokens: int,
    rng: random.Random,
    session_id: str,
    *,
    temperature: float = 0.7,
) -> Question:
    """A chat with a seed of its own, so that a run can be repeated answer by answer."""
    return chat(
        messages,
        max_tokens=max_tokens,
        session=session_id,
        temperature=temperature,
        seed=rng.getrandbits(31),
    )
