"""One streamed answer as its client saw it: when its tokens came, what the server counted, how it ended.

A stream that ends without a finish reason for every choice, or without `[DONE]`, is a failure however clean
its end: a truncated answer must not look like a fast one. Knows what chunks mean; knows neither sockets
nor clocks: whoever reads the body says when each piece came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from loadtest.client.chunk import Chunk, Usage, read_chunk
from loadtest.client.errors import EventTooLong, NotAChunk
from loadtest.client.sse import Event, EventParser

REPLICA_HEADER = "x-warmpath-replica"
_DONE = b"[DONE]"
_OK = 200
_SHOWN_CHARS = 200  # of a server's own error text


class Failure(StrEnum):
    """Why an answer does not count."""

    BUSY = "refused as busy"  # 429 or 503: the server said so at once
    STATUS = "error status"
    ERROR_EVENT = "error in the stream"
    NOT_STREAMED = "not a stream of chunks"
    CUT = "connection cut"
    NO_DONE = "ended without [DONE]"
    NO_FINISH_REASON = "ended without a finish reason"
    TIMEOUT = "took too long"
    UNREACHABLE = "no connection"
    NO_FILES = "client out of open files"  # its own fault: the server was not asked


_BUSY_STATUSES = (429, 503)


@dataclass(frozen=True, slots=True)
class Answer:
    """Times are seconds on the client's clock; what the server did not tell is None."""

    sent_s: float  # when the request was sent
    took_s: float  # from there to the end of the answer
    ttft_s: float | None  # from there to the first piece of text
    gaps_s: tuple[
        float, ...
    ]  # between a choice's piece of text and its next; a piece may hold several tokens
    prompt_tokens: int | None
    cached_tokens: int | None  # of the prompt, the engine's count
    output_tokens: int | None
    replica: str | None  # what answered, where the server says so
    finish_reasons: tuple[str | None, ...]  # per choice
    texts: tuple[str, ...]  # per choice
    status: int | None = None  # of HTTP; None without an answer
    failure: Failure | None = None
    problem: str = ""  # what the server or the connection said of it

    @property
    def is_ok(self) -> bool:
        return self.failure is None

    @property
    def text(self) -> str:
        """The first choice's."""
        return self.texts[0] if self.texts else ""

    @property
    def tpot_s(self) -> float | None:
        """(last piece - first piece) / (tokens - 1), seconds; None for answers of one token.

        Of several choices their mean, by tokens.
        """
        if self.ttft_s is None or self.output_tokens is None or self.output_tokens <= len(self.texts):
            return None
        return sum(self.gaps_s) / (self.output_tokens - len(self.texts))


class AnswerReader:
    """Takes one answer in as it comes, and says at its end what it was."""

    def __init__(self, sent_s: float, *, num_choices: int = 1) -> None:
        self._sent_s = sent_s
        self._parser = EventParser()
        self._finish_reasons: list[str | None] = [None] * num_choices
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._first_s: float | None = None
        self._last_s: list[float | None] = [None] * num_choices  # the latest piece of text of each
        self._gaps: list[float] = []
        self._usage = Usage()
        self._status: int | None = None
        self._replica: str | None = None
        self._is_done = False
        self._done_s = sent_s  # when that was read
        self._heard_s = sent_s  # when the latest event was: comments are none
        self._error_body = bytearray()
        self._failure: Failure | None = None
        self._problem = ""

    @property
    def is_over(self) -> bool:
        """`[DONE]` was read, or what came makes all that may follow worthless."""
        return self._is_done or self._failure is not None

    def silent_s(self, now_s: float) -> float:
        """Since the latest event of the answer, or since it was asked for. Comments, which keep connections
        alive, are none."""
        return now_s - self._heard_s

    def began(self, status: int, headers: Mapping[str, str]) -> None:
        """The answer's head. headers: names in lower case, or a mapping that does not mind."""
        self._status = status
        self._replica = headers.get(REPLICA_HEADER)
        if status in _BUSY_STATUSES:
            self._failure = Failure.BUSY
        elif status != _OK:
            self._failure = Failure.STATUS
        elif "text/event-stream" not in headers.get("content-type", ""):
            self._failure = Failure.NOT_STREAMED

    def feed(self, piece: bytes, now_s: float) -> None:
        """More of the body."""
        if self._failure is not None:
            self._error_body += piece[: _SHOWN_CHARS - len(self._error_body)]
            return
        try:
            events = self._parser.feed(piece)
        except EventTooLong as error:
            self._fail(Failure.NOT_STREAMED, str(error))
            return
        for event in events:
            self._heard_s = now_s
            self._event(event, now_s)

    def finished(self, now_s: float) -> Answer:
        """The body has ended as HTTP says a body ends."""
        if self._failure is None and not self._is_done:
            inside = ", inside an event" if self._parser.is_inside_event else ""
            self._fail(Failure.NO_DONE, f"after {sum(map(len, self._texts))} pieces of text{inside}")
        if self._failure is None and None in self._finish_reasons:
            self._fail(Failure.NO_FINISH_REASON, f"finish reasons {self._finish_reasons}")
        return self._answer(now_s)

    def broke(self, failure: Failure, problem: str, now_s: float) -> Answer:
        """The connection failed. What was wrong before that stays the reason, and what was whole is whole."""
        if self._is_done:
            return self.finished(self._done_s)
        if self._failure is None:
            self._fail(failure, problem)
        return self._answer(now_s)

    def _event(self, event: Event, now_s: float) -> None:
        if self.is_over:
            return
        if event.data == _DONE:
            self._is_done, self._done_s = True, now_s
            return
        if event.name == "error":
            self._fail(Failure.ERROR_EVENT, _shown(event.data))
            return
        try:
            chunk = read_chunk(event.data)
        except NotAChunk as error:
            self._fail(Failure.NOT_STREAMED, str(error))
            return
        if chunk.error:
            self._fail(Failure.ERROR_EVENT, _shown(event.data))
        else:
            self._chunk(chunk, now_s)

    def _chunk(self, chunk: Chunk, now_s: float) -> None:
        self._usage = chunk.usage or self._usage
        is_end = False
        for choice in chunk.choices or ():
            index = choice.index
            if not 0 <= index < len(self._texts):
                self._fail(Failure.NOT_STREAMED, f"choice {index} was not asked for")
                return
            text = choice.said
            if text:
                self._texts[index].append(text)
                self._piece(index, now_s)
            if choice.finish_reason is not None:
                self._finish_reasons[index] = choice.finish_reason
                is_end = True
        if is_end and self._first_s is None:  # all its tokens were such as have no text
            self._first_s = now_s

    def _piece(self, index: int, now_s: float) -> None:
        if self._first_s is None:
            self._first_s = now_s
        last_s, self._last_s[index] = self._last_s[index], now_s
        if last_s is not None:
            self._gaps.append(now_s - last_s)

    def _fail(self, failure: Failure, problem: str) -> None:
        self._failure, self._problem = failure, problem

    def _answer(self, now_s: float) -> Answer:
        return Answer(
            sent_s=self._sent_s,
            took_s=now_s - self._sent_s,
            ttft_s=None if self._first_s is None else self._first_s - self._sent_s,
            gaps_s=tuple(self._gaps),
            prompt_tokens=self._usage.prompt_tokens,
            cached_tokens=self._usage.cached_tokens,
            output_tokens=self._usage.completion_tokens,
            replica=self._replica,
            finish_reasons=tuple(self._finish_reasons),
            texts=tuple("".join(pieces) for pieces in self._texts),
            status=self._status,
            failure=self._failure,
            problem=self._problem or _shown(bytes(self._error_body)),
        )


def _shown(data: bytes) -> str:
    return data[:_SHOWN_CHARS].decode(errors="replace").strip()
