"""Synthetic traffic, seeded: what a fleet may meet beside the published traces.

A generator is a frozen set of parameters; `sessions` turns it into endless sessions, and `GeneratorSource`
lays them over each other at the rate asked for. Sessions come as a Poisson process; gaps inside one do not
depend on the rate. `held_out` is for the last word only: nothing may be tuned on it.
Knows lengths, times and block ids; knows no engine.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import count
from typing import ClassVar, NamedTuple, Protocol

from loadtest.workloads.conversation import (
    BlockIds,
    Conversation,
    SharedText,
    Zipf,
    length,
    pause_s,
    pick,
    shared_text,
)
from loadtest.workloads.errors import UnknownName, WorkloadError
from loadtest.workloads.request import Workload, WorkRequest

BLOCK_TOKENS = 64  # finer than published traces: a chat's messages are shorter than their 512


class Turn(NamedTuple):
    """One request of a session."""

    after_s: float  # seconds since the session's request before it; 0 for the first
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


Session = Iterator[Turn]


class Generator(Protocol):
    """Parameters of one kind of traffic."""

    name: ClassVar[str]

    @property
    def requests_per_session(self) -> float:
        """The mean, near enough to start a search for a rate."""

    @property
    def session_s(self) -> float:
        """Most sessions are over after so long; traffic is stationary that much later than it began."""

    def sessions(self, rng: random.Random, ids: BlockIds) -> Iterator[Session]:
        """Sessions without end. What they share is drawn first, so that a seed fixes it."""


def _at_least(generator: object, low: float, *names: str) -> None:
    for name in names:
        value = getattr(generator, name)
        if not value >= low:
            raise WorkloadError(f"{type(generator).__name__}: {name} = {value:g} is below {low:g}")


@dataclass(frozen=True, slots=True)
class SystemPrompts:
    """Single questions behind a few dozen system prompts, some far more popular than others."""

    name: ClassVar[str] = "system_prompts"
    num_prompts: int = 32
    exponent: float = 1.1  # of the Zipf law of their popularity
    prompt_tokens: float = 3_000  # median
    question_tokens: float = 250  # median
    answer_tokens: float = 180  # median

    def __post_init__(self) -> None:
        _at_least(self, 1, "num_prompts", "prompt_tokens", "question_tokens", "answer_tokens")
        _at_least(self, 0, "exponent")

    @property
    def requests_per_session(self) -> float:
        return 1.0

    @property
    def session_s(self) -> float:
        return 0.0

    def sessions(self, rng: random.Random, ids: BlockIds) -> Iterator[Session]:
        texts = _texts(rng, ids, self.num_prompts, self.prompt_tokens, spread=0.8)
        popularity = Zipf(self.num_prompts, self.exponent)
        while True:
            yield _single(
                _own(rng), ids, pick(rng, texts, popularity), self.question_tokens, self.answer_tokens
            )


@dataclass(frozen=True, slots=True)
class MultiTurn:
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
        _at_least(
            self,
            1,
            "turns",
            "num_prompts",
            "prompt_tokens",
            "first_tokens",
            "message_tokens",
            "answer_tokens",
        )
        _at_least(self, 0.001, "think_s")

    @property
    def requests_per_session(self) -> float:
        return self.turns

    @property
    def session_s(self) -> float:
        return 3 * self.turns * self.think_s

    def sessions(self, rng: random.Random, ids: BlockIds) -> Iterator[Session]:
        texts = _texts(rng, ids, self.num_prompts, self.prompt_tokens, spread=0.5)
        popularity = Zipf(self.num_prompts, 1.0)
        while True:
            yield self._chat(_own(rng), Conversation(ids, BLOCK_TOKENS, pick(rng, texts, popularity)))

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
class HotPrefix:
    """One long prefix that most requests open with: all of it on one replica would drown it."""

    name: ClassVar[str] = "hot_prefix"
    share: float = 0.8  # of requests that open with it; the others share nothing
    prefix_tokens: float = 6_000
    question_tokens: float = 200  # median
    answer_tokens: float = 150  # median

    def __post_init__(self) -> None:
        _at_least(self, 1, "prefix_tokens", "question_tokens", "answer_tokens")
        _at_least(self, 0, "share")
        if self.share > 1:
            raise WorkloadError(f"HotPrefix: share = {self.share:g} is above 1")

    @property
    def requests_per_session(self) -> float:
        return 1.0

    @property
    def session_s(self) -> float:
        return 0.0

    def sessions(self, rng: random.Random, ids: BlockIds) -> Iterator[Session]:
        hot = shared_text(ids, BLOCK_TOKENS, round(self.prefix_tokens))
        while True:
            if rng.random() < self.share:
                yield _single(_own(rng), ids, hot, self.question_tokens, self.answer_tokens)
            else:
                tokens = self.prefix_tokens / 4 + self.question_tokens
                yield _single(_own(rng), ids, None, tokens, self.answer_tokens)


@dataclass(frozen=True, slots=True)
class NoReuse:
    """Prompts that share nothing: a prefix-aware router can only lose here."""

    name: ClassVar[str] = "no_reuse"
    prompt_tokens: float = 1_500  # median
    answer_tokens: float = 150  # median

    def __post_init__(self) -> None:
        _at_least(self, 1, "prompt_tokens", "answer_tokens")

    @property
    def requests_per_session(self) -> float:
        return 1.0

    @property
    def session_s(self) -> float:
        return 0.0

    def sessions(self, rng: random.Random, ids: BlockIds) -> Iterator[Session]:
        while True:
            yield _single(_own(rng), ids, None, self.prompt_tokens, self.answer_tokens)


@dataclass(frozen=True, slots=True)
class DecodeHeavy:
    """Short chats with long answers: engines are full of sequences that decode, and prefill hardly counts."""

    name: ClassVar[str] = "decode_heavy"
    turns: float = 2  # mean, geometric
    message_tokens: float = 120  # median
    answer_tokens: float = 900  # median
    think_s: float = 40  # median

    def __post_init__(self) -> None:
        _at_least(self, 1, "turns", "message_tokens", "answer_tokens")
        _at_least(self, 0.001, "think_s")

    @property
    def requests_per_session(self) -> float:
        return self.turns

    @property
    def session_s(self) -> float:
        return 3 * self.turns * self.think_s

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
        _at_least(
            self, 1, "num_agents", "tools_tokens", "task_tokens", "steps", "call_tokens", "result_tokens"
        )
        _at_least(self, 0, "exponent")
        _at_least(self, 0.001, "tool_s")

    @property
    def requests_per_session(self) -> float:
        return self.steps

    @property
    def session_s(self) -> float:
        return 3 * self.steps * self.tool_s

    def sessions(self, rng: random.Random, ids: BlockIds) -> Iterator[Session]:
        texts = _texts(rng, ids, self.num_agents, self.tools_tokens, spread=0.5)
        popularity = Zipf(self.num_agents, self.exponent)
        while True:
            yield self._task(_own(rng), Conversation(ids, BLOCK_TOKENS, pick(rng, texts, popularity)))

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


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Kept for the last word, never tuned on: documents asked about by many, chats and agents, in changing
    shares.

    Its parameters are its own, not those of the generators above.
    """

    name: ClassVar[str] = "held_out"
    num_documents: int = 160
    document_tokens: float = 9_000  # median

    def __post_init__(self) -> None:
        _at_least(self, 1, "num_documents", "document_tokens")

    @property
    def requests_per_session(self) -> float:
        return 4.5

    @property
    def session_s(self) -> float:
        return 500.0

    def sessions(self, rng: random.Random, ids: BlockIds) -> Iterator[Session]:
        documents = _texts(rng, ids, self.num_documents, self.document_tokens, spread=1.1)
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
                yield self._questions(_own(rng), ids, pick(rng, documents, popularity))

    def _questions(self, rng: random.Random, ids: BlockIds, document: SharedText) -> Session:
        """One reader's questions, each about the document alone."""
        after_s = 0.0
        for _ in range(1 + int(rng.expovariate(1.0))):
            yield from _single(rng, ids, document, 60, 320, after_s=after_s)
            after_s = pause_s(rng, 35, 1.0)


GENERATORS: Mapping[str, type[Generator]] = {
    kind.name: kind
    for kind in (SystemPrompts, MultiTurn, HotPrefix, NoReuse, DecodeHeavy, AgentLoops, HeldOut)
}


def make_generator(name: str, parameters: Mapping[str, float]) -> Generator:
    """The generator of that name, with its defaults for parameters not given.

    Raises UnknownName for a name or parameter that is not there (it lists those that are), WorkloadError
    for a value out of range.
    """
    if name not in GENERATORS:
        raise UnknownName("generator", name, GENERATORS)
    kind = GENERATORS[name]
    known = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    for parameter in parameters:
        if parameter not in known:
            raise UnknownName(f"parameter of {name}", parameter, known)
    build: Callable[..., Generator] = kind
    return build(**{key: int(v) if known[key] == "int" else float(v) for key, v in parameters.items()})


class GeneratorSource:
    """A `Source` that draws its sessions when asked."""

    natural_rate_per_s = 5.0  # it has none of its own: where the search for a load begins

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    @property
    def name(self) -> str:
        return self._generator.name

    @property
    def block_tokens(self) -> int:
        return BLOCK_TOKENS

    def window(self, rate_per_s: float, num_requests: int, seed: int) -> Workload:
        """See `Source`. What was asked before the window opens is left out, its sessions go on into it."""
        rng = random.Random(f"{self.name}/{seed}")
        sessions = enumerate(self._generator.sessions(rng, BlockIds()))
        arrivals = random.Random(f"{self.name}/{seed}/arrivals")
        sessions_per_s = rate_per_s / self._generator.requests_per_session
        opens_s = self._generator.session_s
        chosen: list[WorkRequest] = []
        for time_s, number, turn in _laid_over(sessions, arrivals, sessions_per_s):
            if time_s < opens_s:
                continue
            if not chosen:
                opens_s = time_s  # times count from the first request, as in every window
            chosen.append(
                WorkRequest(time_s - opens_s, turn.input_tokens, turn.output_tokens, turn.block_ids, number)
            )
            if len(chosen) == num_requests:
                break
        return Workload(self.name, BLOCK_TOKENS, tuple(chosen))


def _laid_over(
    sessions: Iterator[tuple[int, Session]], rng: random.Random, sessions_per_s: float
) -> Iterator[tuple[float, int, Turn]]:
    """Every session's turns in order of time; sessions begin as a Poisson process from 0 on."""
    going: list[tuple[float, int, Turn, Session]] = []  # by the time of each one's next turn
    begins_s = rng.expovariate(sessions_per_s)
    while True:
        if not going or begins_s <= going[0][0]:
            number, session = next(sessions)
            heapq.heappush(going, (begins_s, number, next(session), session))
            begins_s += rng.expovariate(sessions_per_s)
            continue
        time_s, number, turn, session = heapq.heappop(going)
        yield time_s, number, turn
        following = next(session, None)
        if following is not None:
            heapq.heappush(going, (time_s + following.after_s, number, following, session))


def _own(rng: random.Random) -> random.Random:
    """One session's own draws, so that it is the same at every rate, however sessions interleave."""
    return random.Random(rng.getrandbits(64))


def _texts(
    rng: random.Random, ids: BlockIds, how_many: int, median_tokens: float, *, spread: float
) -> list[SharedText]:
    return [shared_text(ids, BLOCK_TOKENS, length(rng, median_tokens, spread)) for _ in range(how_many)]


def _single(
    rng: random.Random,
    ids: BlockIds,
    opening: SharedText | None,
    question_tokens: float,
    answer_tokens: float,
    *,
    after_s: float = 0.0,
) -> Session:
    """One question behind an opening, and no second."""
    prompt = Conversation(ids, BLOCK_TOKENS, opening)
    prompt.say(length(rng, question_tokens, 0.9))
    yield Turn(after_s, prompt.tokens, length(rng, answer_tokens, 0.7), prompt.prompt())
