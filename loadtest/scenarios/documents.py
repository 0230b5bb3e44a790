"""Questions about texts: one long document asked about several times, and retrieved passages."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from loadtest.scenarios.scenario import Pause, Script, ask, question, system, user
from loadtest.scenarios.words import text
from loadtest.workloads.conversation import Zipf, pause_s


@dataclass(frozen=True, slots=True)
class LongDocuments:
    """Several questions about one long document, which other readers ask about too.

    The document stands before the question and nothing before it differs: all but the question is shared.
    """

    name: ClassVar[str] = "long_documents"
    num_documents: int = 16
    document_words: int = 3_000
    exponent: float = 1.0  # of the Zipf law of their popularity
    questions: int = 4  # per session
    question_words: int = 20
    answer_tokens: int = 48
    think_s: float = 5.0  # median

    def session(self, rng: random.Random, session_id: str) -> Script:
        number = Zipf(self.num_documents, self.exponent).draw(rng)
        document = text(f"document {number}", self.document_words)
        for index in range(self.questions):
            if index:
                yield Pause(pause_s(rng, self.think_s, 0.7))
            wanted = text(f"question {rng.random()}", self.question_words)
            messages = [system("Answer from the document."), user(f"{document}\n\nQuestion: {wanted}")]
            yield from ask(question(messages, self.answer_tokens, rng, session_id))


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Retrieval-augmented questions: passages of about 512 tokens, some of them asked about all the time.

    The best passage comes first, so two questions that find the same best passage share its prefix, and two
    that find the same list share all of it.
    """

    name: ClassVar[str] = "retrieval"
    num_passages: int = 2_000
    passage_words: int = 512
    passages: int = 2  # in a prompt
    exponent: float = 1.2  # of the Zipf law of their popularity
    question_words: int = 16
    answer_tokens: int = 48

    def session(self, rng: random.Random, session_id: str) -> Script:
        best = Zipf(self.num_passages, self.exponent).draw(rng)
        # What is found beside it follows from it: a retriever finds the same neighbours again.
        found = [(best * (1 + rank) + 7919 * rank) % self.num_passages for rank in range(self.passages)]
        context = "\n\n".join(text(f"passage {number}", self.passage_words) for number in found)
        wanted = text(f"question {rng.random()}", self.question_words)
        messages = [system("Answer from the passages."), user(f"{context}\n\nQuestion: {wanted}")]
        yield from ask(question(messages, self.answer_tokens, rng, session_id))
