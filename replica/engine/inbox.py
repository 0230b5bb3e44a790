"""What other threads ask of the engine's, in the order it came, until nothing is taken any more.

Knows threads and what may be asked; knows neither steps nor what is answered.
"""

from __future__ import annotations

import contextlib
import queue
import threading
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
    """Any thread posts, and none waits for it; the engine thread takes."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards `_why_closed` together with putting a message in
        self._why_closed: str | None = "it was not started"

    @property
    def why_closed(self) -> str | None:
        """None while messages are taken."""
        return self._why_closed

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take at this moment."""
        return self._messages.empty()

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
        """What is here, and what is posted meanwhile; the first is waited for."""
        with contextlib.suppress(queue.Empty):
            yield self._messages.get(timeout=timeout_s)
            while True:
                yield self._messages.get_nowait()
