"""What other threads ask of the engine's, until nothing is taken any more.

    post ──┬── what ends something: Cancel, Abandon, Drain, HandOver, Stop ──> taken first
           └── what makes work: Submit, AskPins ──> after that

Each of the two in the order it came. Between two steps the engine takes no more than running answers may wait
for: so nobody who leaves, and no end of the engine, stands behind a flood of requests. Whoever leaves before
its request was taken has it withdrawn.
Knows threads and what may be asked; knows neither steps nor what is answered.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cache.messages import GenerateRequest
from replica.engine.pins import EnginePins
from replica.engine.stream import DeltaStream
from replica.structures.matcher import StructureMatcher

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerateRequest
    stream: DeltaStream
    arrival_s: float
    structure: StructureMatcher | None  # the request's, compiled


@dataclass(frozen=True, slots=True)
class Cancel:
    stream: DeltaStream


@dataclass(frozen=True, slots=True)
class Abandon:
    stream: DeltaStream  # that nobody reads


@dataclass(frozen=True, slots=True)
class AskPins(Generic[_Answer]):
    question: Callable[[EnginePins], _Answer]
    answer: Future[_Answer]


@dataclass(frozen=True, slots=True)
class Drain:
    pass


@dataclass(frozen=True, slots=True)
class HandOver:
    pass


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Message = Submit | Cancel | Abandon | AskPins[Any] | Drain | HandOver | Stop


class Inbox:
    """Any thread posts, and none waits for it; the engine thread does the rest."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # What was posted, sorted, and not yet taken. Engine thread only.
        self._ends: deque[Message] = deque()
        self._works: deque[Message] = deque()
        self._waiting: dict[DeltaStream, Submit] = {}  # of `_works`, those that nobody has withdrawn
        self._lock = threading.Lock()  # guards `_why_closed` together with putting a message in
        self._why_closed: str | None = "it was not started"

    @property
    def why_closed(self) -> str | None:
        """None while messages are taken."""
        return self._why_closed

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take at this moment."""
        return not (self._ends or self._works) and self._messages.empty()

    def open(self) -> None:
        self._why_closed = None

    def close(self, why: str) -> str:
        """Take nothing after a last `Stop`. Why it is closed: the first reason given."""
        with self._lock:
            if self._why_closed is None:
                self._why_closed = why
                self._messages.put(Stop())
            return self._why_closed

    def post(self, message: Message) -> bool:
        """Put a message where the engine thread will find it; False once it is closed."""
        with self._lock:
            if self._why_closed is not None:
                return False
            self._messages.put(message)
            return True

    def take(self, timeout_s: float) -> Iterator[Message]:
        """What is here, and what is posted meanwhile; the first is waited for. Who stops taking finds what is
        left the next time."""
        if not (self._ends or self._works):
            with contextlib.suppress(queue.Empty):
                self._sort_in(self._messages.get(timeout=timeout_s))
        while True:
            while not self._messages.empty():  # nobody else takes
                self._sort_in(self._messages.get_nowait())
            if not (messages := self._ends or self._works):
                return
            message = messages.popleft()
            if isinstance(message, Submit) and self._waiting.pop(message.stream, None) is None:
                continue
            yield message

    def withdraw(self, stream: DeltaStream) -> Submit | None:
        """Never take what is to be answered there: that. None: it was taken, or is not here."""
        return self._waiting.pop(stream, None)

    def _sort_in(self, message: Message) -> None:
        match message:
            case Submit():
                self._waiting[message.stream] = message
                self._works.append(message)
            case AskPins():
                self._works.append(message)
            case _:
                self._ends.append(message)
