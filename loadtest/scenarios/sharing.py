"""How much of a scenario's prompts could come from a cache: measured by one that forgets nothing.

Words stand for tokens, and a whole answer for the blocks its decoding filled.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.client.answer import Answer
from loadtest.client.question import Message, Question
from loadtest.scenarios.scenario import Ask, Scenario, Stopped
from loadtest.scenarios.words import text

BLOCK_WORDS = 16


class InfiniteCache:
    """Remembers every full block of words that was ever asked or answered."""

    def __init__(self) -> None:
        self._known: set[tuple[int, tuple[str, ...]]] = set()

    def hit_words(self, words: Sequence[str]) -> int:
        """Leading words of a prompt that are cached, in whole blocks; at least one word is not."""
        hit = 0
        for block in self._blocks(words[:-1]):
            if block not in self._known:
                break
            hit += BLOCK_WORDS
        return hit

    def remember(self, words: Sequence[str]) -> None:
        self._known.update(self._blocks(words))

    def _blocks(self, words: Sequence[str]) -> list[tuple[int, tuple[str, ...]]]:
        """(hash of all before, words) of each full block."""
        blocks, parent = [], 0
        for begin in range(0, len(words) - BLOCK_WORDS + 1, BLOCK_WORDS):
            block = (parent, tuple(words[begin : begin + BLOCK_WORDS]))
            blocks.append(block)
            parent = hash(block)
        return blocks


@dataclass(frozen=True, slots=True)
class Sharing:
    requests: int
    prompt_words: int
    hit_words: int

    @property
    def ratio(self) -> float:
        return self.hit_words / self.prompt_words if self.prompt_words else 0.0


def measure(scenario: Scenario, *, sessions: int, seed: int) -> Sharing:
    """Sessions one after the other, answered by a model that says as many words as it may."""
    cache = InfiniteCache()
    requests = prompt_words = hit_words = 0
    rng = random.Random(f"{scenario.name}/{seed}")
    for number in range(sessions):
        script = scenario.session(random.Random(rng.getrandbits(64)), f"session {number}")
        answers: Sequence[Answer] | None = None
        while True:
            try:
                step = next(script) if answers is None else script.send(answers)
            except (StopIteration, Stopped):
                break
            if not isinstance(step, Ask):
                answers = []
                continue
            # All of one step are asked at the same time: none of them finds another's answer.
            prompts = [_words(question) for question in step.questions]
            hit_words += sum(map(cache.hit_words, prompts))
            answers = [made_up(question) for question in step.questions]
            for prompt, answer in zip(prompts, answers, strict=True):
                requests, prompt_words = requests + 1, prompt_words + len(prompt)
                for said in answer.texts:
                    cache.remember([*prompt, *said.split()])
    return Sharing(requests, prompt_words, hit_words)


def made_up(question: Question) -> Answer:
    """What a model might say: words that follow from the prompt and the seed, `max_tokens` of them."""
    body = question.body
    key = f"{body['seed']} {body['messages'][-1]['content'][:80]}"
    texts = tuple(
        text(f"answer {choice} {key}", body["max_tokens"]) for choice in range(question.num_choices)
    )
    return Answer(
        sent_s=0.0,
        took_s=0.0,
        ttft_s=0.0,
        gaps_s=(),
        prompt_tokens=len(_words(question)),
        cached_tokens=None,
        output_tokens=sum(len(said.split()) for said in texts),
        replica=None,
        finish_reasons=("length",) * question.num_choices,
        texts=texts,
        status=200,
    )


def _words(question: Question) -> list[str]:
    """As a chat template would put them: a mark for each role, then its words; then the assistant's turn."""
    messages: Sequence[Message] = question.body["messages"]
    words = [word for message in messages for word in (f"<{message['role']}>", *message["content"].split())]
    return [*words, "<assistant>"]
