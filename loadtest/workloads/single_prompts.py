"""Traffic of single questions: what they share stands at their beginning, and none goes on from another."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from loadtest.workloads.conversation import BlockIds, Zipf, pick, shared_text
from loadtest.workloads.errors import WorkloadError
from loadtest.workloads.generator import BLOCK_TOKENS, Session, at_least, openings, own_draws, single


class SinglePrompts:
    """Each session is one request."""

    __slots__ = ()

    @property
    def requests_per_session(self) -> float:
        return 1.0

    @property
    def session_s(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class SystemPrompts(SinglePrompts):
    """Single questions behind a few dozen system prompts, some far more popular than others."""

    name: ClassVar[str] = "system_prompts"
    num_prompts: int = 32
    exponent: float = 1.1  # of the Zipf law of their popularity
    prompt_tokens: float = 3_000  # median
    question_tokens: float = 250  # median
    answer_tokens: float = 180  # median

    def __post_init__(self) -> None:
        at_least(self, 1, "num_prompts", "prompt_tokens", "question_tokens", "answer_tokens")
        at_least(self, 0, "exponent")

    def sessions(self, rng: random.Random, ids: BlockIds) -> Iterator[Session]:
        texts = openings(rng, ids, self.num_prompts, self.prompt_tokens, spread=0.8)
        popularity = Zipf(self.num_prompts, self.exponent)
        while True:
            yield single(
                own_draws(rng), ids, pick(rng, texts, popularity), self.question_tokens, self.answer_tokens
            )


@dataclass(frozen=True, slots=True)
class HotPrefix(SinglePrompts):
    """One long prefix that most requests open with: all of it on one replica would drown it."""

    name: ClassVar[str] = "hot_prefix"
    share: float = 0.8  # of requests that open with it; the others share nothing
    prefix_tokens: float = 6_000
    question_tokens: float = 200  # median
    answer_tokens: float = 150  # median

    def __post_init__(self) -> None:
        at_least(self, 1, "prefix_tokens", "question_tokens", "answer_tokens")
        at_least(self, 0, "share")
        if self.share > 1:
            raise WorkloadError(f"HotPrefix: share = {self.share:g} is above 1")

    def sessions(self, rng: random.Random, ids: BlockIds) -> Iterator[Session]:
        hot = shared_text(ids, BLOCK_TOKENS, round(self.prefix_tokens))
        while True:
            if rng.random() < self.share:
                yield single(own_draws(rng), ids, hot, self.question_tokens, self.answer_tokens)
            else:
                tokens = self.prefix_tokens / 4 + self.question_tokens
                yield single(own_draws(rng), ids, None, tokens, self.answer_tokens)


@dataclass(frozen=True, slots=True)
class NoReuse(SinglePrompts):
    """Prompts that share nothing: a prefix-aware router can only lose here."""

    name: ClassVar[str] = "no_reuse"
    prompt_tokens: float = 1_500  # median
    answer_tokens: float = 150  # median

    def __post_init__(self) -> None:
        at_least(self, 1, "prompt_tokens", "answer_tokens")

    def sessions(self, rng: random.Random, ids: BlockIds) -> Iterator[Session]:
        while True:
            yield single(own_draws(rng), ids, None, self.prompt_tokens, self.answer_tokens)
