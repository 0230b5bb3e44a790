"""Prompts that open with worked examples: few-shot questions, and many samples of one question."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from loadtest.client.answer import Answer
from loadtest.client.question import Message
from loadtest.scenarios.scenario import Ask, Script, Stopped, ask, assistant, question, user
from loadtest.scenarios.words import text

SHOTS = (3, 5)


def shots(task: int, count: int, words: int) -> list[Message]:
    """The first `count` examples of a task: three of five are the first three, so they share them."""
    messages: list[Message] = []
    for number in range(count):
        messages.append(user(text(f"task {task} example {number}", words)))
        messages.append(assistant(text(f"task {task} solution {number}", max(1, words // 2))))
    return messages


@dataclass(frozen=True, slots=True)
class FewShot:
    """A new case behind the same three or five examples of its task."""

    name: ClassVar[str] = "few_shot"
    num_tasks: int = 6
    example_words: int = 120
    case_words: int = 60
    answer_tokens: int = 32

    def session(self, rng: random.Random, session_id: str) -> Script:
        examples = shots(rng.randrange(self.num_tasks), rng.choice(SHOTS), self.example_words)
        case = user(text(f"case {rng.random()}", self.case_words))
        yield from ask(question([*examples, case], self.answer_tokens, rng, session_id))


@dataclass(frozen=True, slots=True)
class SelfConsistency:
    """Several samples of one chain of thought, then a vote on where they end.

    One request with `n`, or as many requests as samples where the server refuses `n`; which of the two it
    is, the first refusal tells, once per process.
    """

    name: ClassVar[str] = "self_consistency"
    samples: int = 5
    num_tasks: int = 6
    example_words: int = 120
    case_words: int = 80
    answer_tokens: int = 48
    on_vote: Callable[[str, float], None] | None = None  # (winner, its share of the votes)
    _refuses_n: list[bool] = field(default_factory=lambda: [False], compare=False)

    def session(self, rng: random.Random, session_id: str) -> Script:
        examples = shots(rng.randrange(self.num_tasks), SHOTS[0], self.example_words)
        messages = [*examples, user(text(f"case {rng.random()}", self.case_words))]
        one = question(messages, self.answer_tokens, rng, session_id, temperature=1.0)
        texts: Sequence[str] = ()
        if not self._refuses_n[0]:
            (answer,) = yield Ask((one.with_choices(self.samples),), may_refuse=True)
            if answer.is_ok:
                texts = answer.texts
            elif is_refusal(answer):
                self._refuses_n[0] = True
            else:
                raise Stopped
        if self._refuses_n[0]:
            each = [
                question(messages, self.answer_tokens, rng, session_id, temperature=1.0)
                for _ in range(self.samples)
            ]
            texts = [answer.text for answer in (yield from ask(*each))]
        winner, share = vote(texts)
        if self.on_vote is not None:
            self.on_vote(winner, share)


def is_refusal(answer: Answer) -> bool:
    """The server does not do what was asked, and would not do it later either."""
    return answer.status is not None and 400 <= answer.status < 500 and answer.status != 429


def vote(texts: Sequence[str]) -> tuple[str, float]:
    """The last word that most samples end with, and their share; of equals the one said first.

    texts: at least one.
    """
    endings = [(words[-1] if (words := sample.split()) else "") for sample in texts]
    winner, votes = Counter(endings).most_common(1)[0]
    return winner, votes / len(endings)
