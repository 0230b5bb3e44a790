"""Sessions that go on from their own answers: chats with a person, and agents with tools.

Their shapes are the simulator's generators' parameters; their histories hold what the server really said.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import ClassVar

from loadtest.scenarios.scenario import Pause, Script, ask, assistant, question, system, user
from loadtest.scenarios.words import text
from loadtest.workloads.conversation import Zipf, length, pause_s
from loadtest.workloads.dialogues import AgentLoops, DecodeHeavy, MultiTurn


@dataclass(frozen=True, slots=True)
class Chat:
    """Turns behind one of a few system prompts; each prompt repeats all that was said."""

    name: ClassVar[str] = "chat"
    shape: MultiTurn = field(default_factory=lambda: MultiTurn(first_tokens=300, answer_tokens=48, think_s=4))

    def session(self, rng: random.Random, session_id: str) -> Script:
        yield from talk(self.name, self.shape, rng, session_id)


@dataclass(frozen=True, slots=True)
class LongAnswers:
    """Adverse: short prompts, long answers. Engines decode, and where a prefix lies hardly matters."""

    name: ClassVar[str] = "decode_heavy"
    shape: DecodeHeavy = field(default_factory=lambda: DecodeHeavy(answer_tokens=400, think_s=4))

    def session(self, rng: random.Random, session_id: str) -> Script:
        chats = MultiTurn(
            turns=self.shape.turns,
            num_prompts=2,
            prompt_tokens=100,
            first_tokens=self.shape.message_tokens,
            message_tokens=self.shape.message_tokens,
            answer_tokens=self.shape.answer_tokens,
            think_s=self.shape.think_s,
        )
        yield from talk(self.name, chats, rng, session_id)


def talk(name: str, shape: MultiTurn, rng: random.Random, session_id: str) -> Script:
    """One chat of this shape. Answers are as long as the model makes them, up to what is drawn."""
    opening = Zipf(shape.num_prompts, 1.0).draw(rng)
    messages = [system(text(f"{name} system {opening}", round(shape.prompt_tokens)))]
    num_words = length(rng, shape.first_tokens, 1.0, longest=round(8 * shape.first_tokens))
    while True:
        messages.append(user(text(f"{name} message {rng.random()}", num_words)))
        max_tokens = length(rng, shape.answer_tokens, 0.7, longest=round(4 * shape.answer_tokens))
        (answer,) = yield from ask(question(messages, max_tokens, rng, session_id))
        if rng.random() < 1.0 / shape.turns:
            return
        messages.append(assistant(answer.text))
        yield Pause(pause_s(rng, shape.think_s, 0.9))
        num_words = length(rng, shape.message_tokens, 0.8, longest=round(8 * shape.message_tokens))


@dataclass(frozen=True, slots=True)
class Agent:
    """Tool calls in quick succession behind a long description of tools."""

    name: ClassVar[str] = "agent"
    shape: AgentLoops = field(
        default_factory=lambda: AgentLoops(
            num_agents=4, tools_tokens=2_000, steps=8, call_tokens=32, result_tokens=150, tool_s=0.7
        )
    )

    def session(self, rng: random.Random, session_id: str) -> Script:
        shape = self.shape
        kind = Zipf(shape.num_agents, shape.exponent).draw(rng)
        messages = [
            system(text(f"agent tools {kind}", round(shape.tools_tokens))),
            user(text(f"agent task {rng.random()}", length(rng, shape.task_tokens, 0.8, longest=2_000))),
        ]
        while True:
            max_tokens = length(rng, shape.call_tokens, 0.6, longest=round(4 * shape.call_tokens))
            (call,) = yield from ask(question(messages, max_tokens, rng, session_id, temperature=0.0))
            if rng.random() < 1.0 / shape.steps:
                return
            yield Pause(pause_s(rng, shape.tool_s, 0.8))
            num_words = length(rng, shape.result_tokens, 1.3, longest=2_000)
            result = f"Result: {text(f'agent result {rng.random()}', num_words)}"
            messages += [assistant(call.text), user(result)]
