"""Traffic kept for the last word: nothing may be tuned on it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from loadtest.workloads.conversation import BlockIds, SharedText, Zipf, pause_s, pick
from loadtest.workloads.dialogues import AgentLoops, MultiTurn
from loadtest.workloads.generator import Session, at_least, openings, own_draws, single


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Kept for the last word, never tuned on: documents asked about by many, chats and agents, in changing
    shares.

    Its parameters are its own, not those of the generators it is made of.
    """

    name: ClassVar[str] = "held_out"
    num_documents: int = 160
    document_tokens: float = 9_000  # median

    def __post_init__(self) -> None:
        at_least(self, 1, "num_documents", "document_tokens")

    @property
    def requests_per_session(self) -> float:
        return 4.5

    @property
    def session_s(self) -> float:
        return 500.0

    def sessions(self, rng: random.Random, ids: BlockIds) -> Iterator[Session]:
        documents = openings(rng, ids, self.num_documents, self.document_tokens, spread=1.1)
        popularity = Zipf(self.num_documents, 0.9)
        chats = MultiTurn(turns=8, num_prompts=9, prompt_tokens=1_700, first_tokens=350, think_s=45).sessions(
            rng, ids
        )
        agents = AgentLoops(
            num_agents=3, tools_tokens=11_000, steps=20, result_tokens=900, tool_s=6
        ).sessions(rng, ids)
        share_of_agents = 0.05
        for number in count():
            # The mix drifts: a policy that learned yesterday's popularity is wrong today.
            if number % 200 == 0:
                share_of_agents = rng.uniform(0.0, 0.12)
            draw = rng.random()
            if draw < share_of_agents:
                yield next(agents)
            elif draw < 0.5:
                yield next(chats)
            else:
                yield self._questions(own_draws(rng), ids, pick(rng, documents, popularity))

    def _questions(self, rng: random.Random, ids: BlockIds, document: SharedText) -> Session:
        """One reader's questions, each about the document alone."""
        after_s = 0.0
        for _ in range(1 + int(rng.expovariate(1.0))):
            yield from single(rng, ids, document, 60, 320, after_s=after_s)
            after_s = pause_s(rng, 35, 1.0)
