"""Traffic token by token: every prompt and every answer spelled out, so that prefixes part where they part.

The published trace knows its prompts by blocks of 512 tokens: between its conversations nothing finer is
known, and what follows a shared block is taken to differ from its first token on; within one, each turn's
text is what the next one begins with. The generated kinds are exact to the token.
Knows texts and times; knows no cache.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path

from cache.types import pack_tokens
from loadtest.simulation.turns import name_contents
from loadtest.workloads.conversation import BlockIds, Conversation, Zipf, length, pause_s, pick, shared_text
from loadtest.workloads.trace_source import TraceSource
from loadtest.workloads.traces import read_trace

TRACE_RATE_PER_S = 0.5  # what the simulated machine can serve without an endless queue
TO_THE_TOKEN = 1  # tokens per "block" of a generated text


@dataclass(frozen=True, slots=True)
class Job:
    """One request, and the answer it gets."""

    arrival_s: float  # since the start
    prompt: array[int]
    answer: array[int]


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind of generated traffic comes."""

    sessions_per_s: float
    sessions: Callable[[random.Random, BlockIds], Iterator[Iterator[Turn]]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session, before it has a time."""

    after_s: float  # since the session's one before; 0 for the first
    prompt: array[int]
    answer: array[int]


def trace_jobs(path: Path, num_requests: int, seed: int) -> list[Job]:
    """A window of the trace with so many of its sessions as one engine can serve.

    Raises TraceError for a file that is none.
    """
    workload = TraceSource(read_trace(path)).window(TRACE_RATE_PER_S, num_requests, seed)
    size, first_token = workload.block_tokens, dict[int, int]()
    jobs = []
    for work, text in zip(workload.requests, name_contents(workload).texts, strict=True):
        tokens = pack_tokens(())
        for block in text:
            start = first_token.setdefault(block, len(first_token) * size)
            tokens.extend(range(start, start + size))
        prompt, end = tokens[: work.input_tokens], work.input_tokens + work.output_tokens
        jobs.append(Job(work.arrival_s, prompt, tokens[work.input_tokens : end]))
    return jobs


def generated_jobs(name: str, num_requests: int, seed: int) -> list[Job]:
    """Sessions begin as a Poisson process. The same arguments give the same jobs."""
    kind, rng = KINDS[name], random.Random(f"{name}/{seed}")
    sessions = kind.sessions(rng, BlockIds())
    going: list[tuple[float, int, Turn, Iterator[Turn]]] = []  # by the time of each one's next turn
    begins_s, number, jobs = 0.0, 0, list[Job]()
    while len(jobs) < num_requests:
        if not going or begins_s <= going[0][0]:
            session = next(sessions)
            heappush(going, (begins_s, number, next(session), session))
            begins_s += rng.expovariate(kind.sessions_per_s)
        else:
            time_s, session_number, turn, session = heappop(going)
            jobs.append(Job(time_s, turn.prompt, turn.answer))
            if (following := next(session, None)) is not None:
                heappush(going, (time_s + following.after_s, session_number, following, session))
        number += 1
    return jobs


def _said(text: Conversation, answer_tokens: int, after_s: float = 0.0) -> Turn:
    """What has been said so far is the prompt; the answer is said."""
    num_prompt = text.tokens
    text.say(answer_tokens)
    tokens = pack_tokens(text.prompt())
    return Turn(after_s, tokens[:num_prompt], tokens[num_prompt:])


def _chats(rng: random.Random, ids: BlockIds) -> Iterator[Iterator[Turn]]:
    """Chats behind one of four system prompts; each turn repeats all before it."""
    openings = [shared_text(ids, TO_THE_TOKEN, length(rng, 800, 0.5)) for _ in range(4)]
    popularity = Zipf(4, 1.0)

    def chat() -> Iterator[Turn]:
        text = Conversation(ids, TO_THE_TOKEN, pick(rng, openings, popularity))
        text.say(length(rng, 600, 1.0))
        after_s = 0.0
        while True:
            yield _said(text, length(rng, 150, 0.7), after_s)
            if rng.random() < 1 / 5:
                return
            text.say(length(rng, 100, 0.8))
            after_s = pause_s(rng, 20, 0.9)

    while True:
        yield chat()


def _few_shot(rng: random.Random, ids: BlockIds) -> Iterator[Iterator[Turn]]:
    """Sets of examples, and eight questions behind one of them at once."""
    examples = [shared_text(ids, TO_THE_TOKEN, length(rng, 1500, 0.5)) for _ in range(40)]
    popularity = Zipf(40, 0.9)

    def batch() -> Iterator[Turn]:
        chosen = pick(rng, examples, popularity)
        for _ in range(8):
            question = Conversation(ids, TO_THE_TOKEN, chosen)
            question.say(length(rng, 60, 0.5))
            yield _said(question, length(rng, 20, 0.7))

    while True:
        yield batch()


def _twins(rng: random.Random, ids: BlockIds) -> Iterator[Iterator[Turn]]:
    """One question asked by four at once and answered alike, as a popular page's suggestion is, greedily."""

    def crowd() -> Iterator[Turn]:
        text = Conversation(ids, TO_THE_TOKEN)
        text.say(length(rng, 1200, 0.7))
        turn = _said(text, length(rng, 200, 0.5))
        for _ in range(4):
            yield turn

    while True:
        yield crowd()


KINDS: Mapping[str, Kind] = {
    "chats": Kind(4.0, _chats),
    "few_shot": Kind(5.0, _few_shot),
    "twins": Kind(2.5, _twins),
}
