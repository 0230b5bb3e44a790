"""Clients: streams of completions, in closed and open loop, and what became of each.

Believes nothing: an answer counts as whole only with a finish_reason, `[DONE]` and a clean end of the body,
because a stream that merely stops looks like success to most clients. Knows HTTP; knows no cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

TIMEOUT_S = 120.0  # between two bytes; longer than anything promised


@dataclass(frozen=True, slots=True)
class Question:
    """One completion to ask for. Equal questions have equal answers, whoever gives them."""

    prompt: tuple[int, ...] = field(repr=False)  # token ids
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    extra: tuple[tuple[str, Any], ...] = ()  # further fields of the body
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def body(self) -> bytes:
        fields: dict[str, Any] = {
            "model": "tiny",
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **dict(self.extra),
        }
        if self.seed is not None:
            fields["seed"] = self.seed
        return json.dumps(fields).encode()


@dataclass(slots=True)
class Outcome:
    """What one client saw. Times are `time.monotonic()`, seconds; None: it has not happened."""

    question: Question
    sent_s: float
    first_s: float | None = None  # first token
    token_times: list[float] = field(default_factory=list)  # of each event that carried text
    ended_s: float | None = None
    status: int | None = None
    error: str | None = None  # None: none seen; else "status 503 no_replica", "event too_many_deaths", ...
    text: str = ""
    finish_reason: str | None = None
    cached_tokens: int | None = None
    overlap_blocks: int | None = None  # what the Router expected of it
    replica: str | None = None  # who computed the first token
    is_done: bool = False  # `[DONE]` came
    is_cut: bool = False  # the connection broke before the body's end
    is_cancelled: bool = False  # by us

    @property
    def is_whole(self) -> bool:
        """Everything a client may expect of a success."""
        return self.status == 200 and self.error is None and self.is_done and self.finish_reason is not None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def failure(self) -> str | None:
        """Why it is no success; None for successes and for what was cancelled by us."""
        if self.is_whole or self.is_cancelled:
            return None
        return self.error or "truncated"


def clients() -> httpx.AsyncClient:
    """A new connection for each request, as many clients would: the proxies choose anew."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(TIMEOUT_S, connect=60.0, pool=None)
    return httpx.AsyncClient(limits=limits, timeout=timeout)


async def ask(
    client: httpx.AsyncClient, url: str, question: Question, outcome: Outcome | None = None
) -> Outcome:
    """Ask and listen to the end. Raises nothing of HTTP's: what failed is in the outcome.

    outcome: filled while it goes on, for whoever wants to watch it. Cancelling the task hangs up.
    """
    outcome = outcome or Outcome(question, time.monotonic())
    try:
        headers = {"content-type": "application/json", **dict(question.headers)}
        async with client.stream(
            "POST", f"{url}/v1/completions", content=question.body, headers=headers
        ) as answer:
            outcome.status = answer.status_code
            outcome.replica = answer.headers.get("x-warmpath-replica")
            if (expected := answer.headers.get("x-warmpath-overlap-blocks")) is not None:
                outcome.overlap_blocks = int(expected)
            if answer.status_code != 200:
                outcome.error = f"status {answer.status_code} {_code(await answer.aread())}".rstrip()
                return outcome
            async for line in answer.aiter_lines():
                _take(outcome, line)
    except httpx.HTTPError as error:
        if outcome.status is not None:
            outcome.is_cut = True
        outcome.error = outcome.error or f"{type(error).__name__}: {error}"[:200]
    except asyncio.CancelledError:
        outcome.is_cancelled = True
        raise
    finally:
        outcome.ended_s = time.monotonic()
    return outcome


def _take(outcome: Outcome, line: str) -> None:
    if not line.startswith("data: "):
        return
    if line == "data: [DONE]":
        outcome.is_done = True
        return
    event = json.loads(line[6:])
    if "error" in event:
        outcome.error = f"event {event['error'].get('code')}"
        return
    now = time.monotonic()
    for choice in event["choices"]:
        if choice["text"]:
            outcome.first_s = outcome.first_s or now
            outcome.token_times.append(now)
            outcome.text += choice["text"]
        outcome.finish_reason = choice["finish_reason"] or outcome.finish_reason
    if usage := event.get("usage"):
        outcome.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]


def _code(content: bytes) -> str:
    try:
        error = json.loads(content)["error"]
        return str(error["code"] or error["type"])
    except (ValueError, KeyError, TypeError):
        return f"without an error object: {content[:80]!r}"


class Traffic:
    """Load in the background. `async with` starts it; leaving stops asking and hears all answers out."""

    def __init__(self, url: str, questions: Iterable[Question]) -> None:
        self.url = url
        self.outcomes: list[Outcome] = []  # in order of sending, those under way included
        self._questions = iter(questions)
        self._client = clients()
        self._stopping = asyncio.Event()
        self._asking: set[asyncio.Task[Outcome]] = set()
        self._source: asyncio.Task[None] | None = None

    @property
    def running(self) -> list[Outcome]:
        """Those under way."""
        return [each for each in self.outcomes if each.ended_s is None]

    @property
    def ended(self) -> list[Outcome]:
        return [each for each in self.outcomes if each.ended_s is not None]

    def begin(self, question: Question | None = None) -> tuple[asyncio.Task[Outcome], Outcome]:
        """Ask the next question, or this one, now. Cancel the task to hang up."""
        question = question or next(self._questions)
        outcome = Outcome(question, time.monotonic())
        self.outcomes.append(outcome)
        task = asyncio.create_task(ask(self._client, self.url, question, outcome))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return task, outcome

    def stop(self) -> None:
        """Ask nothing more."""
        self._stopping.set()

    async def __aenter__(self) -> Self:
        self._source = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        assert self._source is not None
        await asyncio.gather(self._source, return_exceptions=True)
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self._client.aclose()
        if not self._source.cancelled() and (error := self._source.exception()) is not None:
            raise error

    async def _run(self) -> None:
        """Asks until `stop`."""
        raise NotImplementedError

    async def _pause(self, seconds: float) -> bool:
        """Wait; False if told to stop."""
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), seconds)
        else:
            await asyncio.sleep(0)
        return not self._stopping.is_set()


class ClosedLoop(Traffic):
    """So many clients, each with one request under way at a time."""

    def __init__(
        self, url: str, questions: Iterable[Question], *, num_clients: int, rate_per_s: float | None = None
    ) -> None:
        """rate_per_s: of all clients together at most; None: each asks again at once."""
        super().__init__(url, questions)
        self._num_clients = num_clients
        self._period_s = 0.0 if rate_per_s is None else num_clients / rate_per_s

    async def _run(self) -> None:
        await asyncio.gather(*(self._one(index / self._num_clients) for index in range(self._num_clients)))

    async def _one(self, phase: float) -> None:
        due = time.monotonic() + phase * self._period_s
        while await self._pause(due - time.monotonic()):
            task, _ = self.begin()
            await asyncio.gather(task, return_exceptions=True)  # a client that hung up asks again
            # A client that is late does not make up for it: the rate is a ceiling.
            due = max(due + self._period_s, time.monotonic())


class OpenLoop(Traffic):
    """Arrivals that wait for nobody: a Poisson process, the same for the same seed."""

    def __init__(self, url: str, questions: Iterable[Question], *, rate_per_s: float, seed: int = 0) -> None:
        super().__init__(url, questions)
        self._rate_per_s = rate_per_s
        self._random = random.Random(seed)

    async def _run(self) -> None:
        due = time.monotonic()
        while True:
            due += self._random.expovariate(self._rate_per_s)
            if not await self._pause(due - time.monotonic()):
                return
            self.begin()


def conversations(
    *,
    num_prefixes: int,
    prefix_tokens: int,
    tail_tokens: int,
    max_tokens: int,
    variants: int = 4,
    vocab_size: int = 1000,
    seed: int = 0,
) -> list[Question]:
    """`num_prefixes * variants` questions: shared beginnings, tails of their own; half are sampled."""
    draw = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(10, vocab_size) for _ in range(count))

    prefixes = [tokens(prefix_tokens) for _ in range(num_prefixes)]
    questions = []
    for index, prefix in itertools.product(range(variants), prefixes):
        prompt = prefix + tokens(tail_tokens)
        sampled = bool(index % 2)
        questions.append(
            Question(
                prompt, max_tokens, 1.0 if sampled else 0.0, draw.randrange(1 << 31) if sampled else None
            )
        )
    return questions


def cycle(questions: Iterable[Question], seed: int = 0) -> Iterator[Question]:
    """For ever, each round in another order."""
    round_, draw = list(questions), random.Random(seed)
    while True:
        draw.shuffle(round_)
        yield from round_


@contextlib.asynccontextmanager
async def one_client() -> AsyncIterator[httpx.AsyncClient]:
    async with clients() as client:
        yield client


async def answers(url: str, questions: Iterable[Question], *, at_once: int = 8) -> dict[Question, Outcome]:
    """Each question's outcome, `at_once` at a time: undisturbed, its text is what later ones must equal."""
    waiting = asyncio.Semaphore(at_once)

    async def one(client: httpx.AsyncClient, question: Question) -> Outcome:
        async with waiting:
            return await ask(client, url, question)

    async with clients() as client:
        wanted = list(questions)
        found = await asyncio.gather(*(one(client, question) for question in wanted))
    return dict(zip(wanted, found, strict=True))
