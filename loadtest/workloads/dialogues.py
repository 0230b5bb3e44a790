"""Traffic of sessions that go on: each prompt repeats all that was said before it.

`MultiTurn` and `DecodeHeavy` are chats, with a person's pauses; `AgentLoops` has a tool's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from loadtest.workloads.conversation import BlockIds, Conversation, Zipf, length, pause_s, pick
from loadtest.workloads.generator import BLOCK_TOKENS, Session, Turn, at_least, openings, own_draws

LONG_SESSION = 3  # times the mean: most sessions are over by then


class Chats:
    """A geometric number of turns, a person's pause before each but the first."""

    __slots__ = ()

    turns: float  # mean
    think_s: float  # median pause

    @property
    def requests_per_session(self) -> float:
        return self.turns

    @property
    def session_s(self) -> float:
        return LONG_SESSION * self.turns * self.think_s


@dataclass(frozen=True, slots=True)
class MultiTurn(Chats):
    """Chats: a system prompt of the application, then turns that each repeat all before them."""

    name: ClassVar[str] = "multi_turn"
    turns: float = 6  # mean, geometric
    num_prompts: int = 4
    prompt_tokens: float = 800  # median
    first_tokens: float = 900  # median of the first message: questions often come with a document
    message_tokens: float = 120  # median of later messages
    answer_tokens: float = 250  # median
    think_s: float = 25  # median, from one request to the next

    def __post_init__(self) -> None:
        at_least(
            self,
            1,
            "turns",
            "num_prompts",
            "prompt_tokens",
            "first_tokens",
            "message_tokens",
            "answer_tokens",
        )
        at_least(self, 0.001, "think_s")

    def sessions(self, rng: random.Random, ids: BlockIds) -> Iterator[Session]:
        texts = openings(rng, ids, self.num_prompts, self.prompt_tokens, spread=0.5)
        popularity = Zipf(self.num_prompts, 1.0)
        while True:
            yield self._chat(own_draws(rng), Conversation(ids, BLOCK_TOKENS, pick(rng, texts, popularity)))

    def _chat(self, rng: random.Random, chat: Conversation) -> Session:
        after_s = 0.0
        message = length(rng, self.first_tokens, 1.0)
        while True:
            chat.say(message)
            answer = length(rng, self.answer_tokens, 0.7)
            yield Turn(after_s, chat.tokens, answer, chat.prompt())
            if rng.random() < 1.0 / self.turns:
                return
            chat.say(answer)
            after_s = pause_s(rng, self.think_s, 0.9)
            message = length(rng, self.message_tokens, 0.8)


@dataclass(frozen=True, slots=True)
class DecodeHeavy(Chats):
    """Short chats with long answers: engines are full of sequences that decode, and prefill hardly counts."""

    name: ClassVar[str] = "decode_heavy"
    turns: float = 2  # mean, geometric
    message_tokens: float = 120  # median
    answer_tokens: float = 900  # median
    think_s: float = 40  # median

    def __post_init__(self) -> None:
        at_least(self, 1, "turns", "message_tokens", "answer_tokens")
        at_least(self, 0.001, "think_s")

    def sessions(self, rng: random.Random, ids: BlockIds) -> Iterator[Session]:
        return self._chats().sessions(rng, ids)

    def _chats(self) -> MultiTurn:
        return MultiTurn(
            turns=self.turns,
            num_prompts=2,
            prompt_tokens=200,
            first_tokens=self.message_tokens,
            message_tokens=self.message_tokens,
            answer_tokens=self.answer_tokens,
            think_s=self.think_s,
        )


@dataclass(frozen=True, slots=True)
class AgentLoops:
    """Agents that call tools: a long description of tools, then many short steps in quick succession."""

    name: ClassVar[str] = "agent_loops"
    num_agents: int = 6
    exponent: float = 0.8  # of the Zipf law of their popularity
    tools_tokens: float = 5_000  # median
    task_tokens: float = 600  # median
    steps: float = 12  # mean, geometric
    call_tokens: float = 70  # median of what the model says to call a tool
    result_tokens: float = 500  # median of what the tool answers; now and then a whole file
    tool_s: float = 3  # median, from one request to the next

    def __post_init__(self) -> None:
        at_least(
            self, 1, "num_agents", "tools_tokens", "task_tokens", "steps", "call_tokens", "result_tokens"
        )
        at_least(self, 0, "exponent")
        at_least(self, 0.001, "tool_s")

    @property
    def requests_per_session(self) -> float:
        return self.steps

    @property
    def session_s(self) -> float:
        return LONG_SESSION * self.steps * self.tool_s

    def sessions(self, rng: random.Random, ids: BlockIds) -> Iterator[Session]:
        texts = openings(rng, ids, self.num_agents, self.tools_tokens, spread=0.5)
        popularity = Zipf(self.num_agents, self.exponent)
        while True:
            yield self._task(own_draws(rng), Conversation(ids, BLOCK_TOKENS, pick(rng, texts, popularity)))

    def _task(self, rng: random.Random, task: Conversation) -> Session:
        task.say(length(rng, self.task_tokens, 0.8))
        after_s = 0.0
        while True:
            call = length(rng, self.call_tokens, 0.6)
            yield Turn(after_s, task.tokens, call, task.prompt())
            if rng.random() < 1.0 / self.steps:
                return
            task.say(call + length(rng, self.result_tokens, 1.3, longest=20_000))
            after_s = pause_s(rng, self.tool_s, 0.8)
