"""Search over partial solutions: branch, score every branch, go on from the best, drop the rest."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import ClassVar

from loadtest.scenarios.scenario import Script, ask, assistant, question, system, user
from loadtest.scenarios.words import text

_NUMBER = re.compile(r"\d+")
_WORST = 0


@dataclass(frozen=True, slots=True)
class TreeOfThought:
    """All branches of a node share its whole path; what is pruned stays in caches until something needs
    the room."""

    name: ClassVar[str] = "tree_of_thought"
    instructions_words: int = 300
    problem_words: int = 120
    depth: int = 3
    branches: int = 3  # of every kept node
    kept: int = 2  # nodes of a level that are gone on from
    thought_tokens: int = 32
    score_tokens: int = 4

    def session(self, rng: random.Random, session_id: str) -> Script:
        root = [
            system(text("tree of thought instructions", self.instructions_words)),
            user(text(f"problem {rng.random()}", self.problem_words)),
        ]
        paths = [root]
        for _ in range(self.depth):
            proposals = [
                (path, question([*path, user("Next step?")], self.thought_tokens, rng, session_id))
                for path in paths
                for _ in range(self.branches)
            ]
            thoughts = yield from ask(*(asked for _, asked in proposals))
            grown = [
                [*path, user("Next step?"), assistant(thought.text)]
                for (path, _), thought in zip(proposals, thoughts, strict=True)
            ]
            scores = yield from ask(
                *(
                    question([*path, user("Score 0-9:")], self.score_tokens, rng, session_id, temperature=0.0)
                    for path in grown
                )
            )
            ranked = sorted(range(len(grown)), key=lambda at: -score(scores[at].text))
            paths = [grown[at] for at in ranked[: self.kept]]


def score(said: str) -> int:
    """The first number in it; a model that names none gives the worst."""
    number = _NUMBER.search(said)
    return _WORST if number is None else int(number[0])
