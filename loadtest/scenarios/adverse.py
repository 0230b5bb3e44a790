"""Traffic that prefix-aware routing cannot win on, and must not lose on: nothing shared, or one hot prefix.

The third of the kind, long answers, is a dialogue: `dialogues.LongAnswers`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import ClassVar

from loadtest.scenarios.scenario import Script, ask, question, system, user
from loadtest.scenarios.words import text
from loadtest.workloads.conversation import length
from loadtest.workloads.single_prompts import HotPrefix, NoReuse


@dataclass(frozen=True, slots=True)
class NoSharing:
    """Every prompt is new from its first word."""

    name: ClassVar[str] = "no_sharing"
    shape: NoReuse = field(default_factory=lambda: NoReuse(prompt_tokens=400, answer_tokens=32))

    def session(self, rng: random.Random, session_id: str) -> Script:
        num_words = length(rng, self.shape.prompt_tokens, 0.9, longest=4_000)
        messages = [user(text(f"unshared {rng.random()}", num_words))]
        max_tokens = length(rng, self.shape.answer_tokens, 0.7, longest=256)
        yield from ask(question(messages, max_tokens, rng, session_id))


@dataclass(frozen=True, slots=True)
class HotSystemPrompt:
    """Nearly everybody opens with the same long system prompt: all of them on one replica would drown it."""

    name: ClassVar[str] = "hot_system_prompt"
    shape: HotPrefix = field(
        default_factory=lambda: HotPrefix(
            share=0.9, prefix_tokens=2_000, question_tokens=40, answer_tokens=32
        )
    )

    def session(self, rng: random.Random, session_id: str) -> Script:
        shape = self.shape
        is_hot = rng.random() < shape.share
        prompt = "hot system prompt" if is_hot else f"other system prompt {rng.random()}"
        num_words = round(shape.prefix_tokens if is_hot else shape.prefix_tokens / 4)
        wanted = text(f"hot {rng.random()}", length(rng, shape.question_tokens, 0.9, longest=1_000))
        max_tokens = length(rng, shape.answer_tokens, 0.7, longest=256)
        yield from ask(question([system(text(prompt, num_words)), user(wanted)], max_tokens, rng, session_id))
