"""What requests have produced and not sent yet, and the streams that it goes to.

Several answers to one prompt share a stream: each ends with a delta of its own, and an error ends them all.
Knows requests and streams; knows neither steps nor why a request ends. Engine thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cache.errors import ServingError
from cache.events import RequestEnded
from cache.messages import Delta, GenerateRequest
from cache.types import RequestId
from replica.engine.engine_core import Progress
from replica.engine.stream import DeltaStream, Parcel, deliver
from replica.scheduling.request import Request


@dataclass(slots=True, eq=False)
class _Asked:
    """A request as it came, and what has become of its answers."""

    request_id: RequestId
    attempt: int
    stream: DeltaStream  # of all of them
    live: list[_Live] = field(default_factory=list)  # those that have not ended
    num_tokens: int = 0  # of those that have, sampled here


@dataclass(slots=True, eq=False)
class _Live:
    """A request being served: one answer."""

    request: Request
    asked: _Asked
    unsent: list[int] = field(default_factory=list)
    sent_s: float | None = None  # when its last delta left; None before the first


class Outbox:
    """Deltas are put into parcels, one for each event loop; `deliver` hands these over."""

    def __init__(self, stream_interval_s: float, on_ended: Callable[[RequestEnded], None]) -> None:
        """on_ended: told of each request as it came, once all its answers have ended here."""
        self._stream_interval_s = stream_interval_s
        self._on_ended = on_ended
        self._asked: dict[DeltaStream, _Asked] = {}  # none without a live answer
        self._live: dict[Request, _Live] = {}
        self._parcels: dict[asyncio.AbstractEventLoop, Parcel] = {}

    def request_ids(self) -> list[RequestId]:
        """Of all that are being served. One list() of a dictionary: any thread sees it whole."""
        return [request.request_id for request in list(self._live)]

    def open(self, asked: GenerateRequest, answers: Sequence[Request], stream: DeltaStream) -> None:
        """They are being served from now on, and this is where their tokens go."""
        whole = self._asked[stream] = _Asked(asked.request_id, asked.attempt, stream)
        for request in answers:
            live = self._live[request] = _Live(request, whole)
            whole.live.append(live)

    def close(self, stream: DeltaStream) -> list[Request]:
        """Nobody reads it any more: the requests that were being computed for it. O(its answers)."""
        asked = self._asked.get(stream)
        closed = [] if asked is None else asked.live[:]
        for live in closed:
            self._end(live)
        # Who has its end, and only was not told yet, has left its name to others.
        return [live.request for live in closed if live.request.finish_reason is None]

    def close_all(self, make_error: Callable[[], ServingError], *, sends_rest: bool) -> list[Request]:
        """Every stream ends with an error, after what was computed for it, if `sends_rest`; the requests."""
        closed: list[Request] = []
        for stream, asked in list(self._asked.items()):
            for live in asked.live:
                if sends_rest and live.unsent:
                    self._send_unsent(live)
            closed += self.close(stream)
            self.send(stream, make_error())
        return closed

    def record(self, progress: Progress) -> list[Request]:
        """Take down a token, and send the rest of a request that is over.

        Requests that are left without their stream, because another answer in it has failed.
        """
        live = self._live.get(progress.request)
        if live is None:
            return []  # cancelled between its end and this step, which tells of it
        if progress.token_id is not None:
            live.unsent.append(progress.token_id)
        if not progress.is_last:
            return []
        if live.unsent or progress.error is None:
            self._send_unsent(live)
        self._end(live)
        if progress.error is None:
            return []
        self.send(live.asked.stream, progress.error)
        return self.close(live.asked.stream)

    def send_due(self, now_s: float, step_s: float) -> None:
        """Send what may not wait for another step: also of requests that this step did not move.

        step_s: what a step takes, going by the last one.
        """
        last_call_s = now_s + step_s - self._stream_interval_s
        for live in self._live.values():
            if live.unsent and (live.sent_s is None or live.sent_s <= last_call_s):
                live.sent_s = now_s
                self._send_unsent(live)

    def send(self, stream: DeltaStream, item: Delta | ServingError) -> None:
        self._parcels.setdefault(stream.loop, []).append((stream, item))

    def deliver(self) -> list[Request]:
        """Hand each event loop its parcel: one wake-up per loop and step, however many streams.

        Requests whose loop is closed: nobody is left to read.
        """
        parcels, self._parcels = self._parcels, {}
        closed: list[Request] = []
        for loop, parcel in parcels.items():
            try:
                loop.call_soon_threadsafe(deliver, parcel)
            except RuntimeError:  # the loop is closed
                for stream in {id(stream): stream for stream, _ in parcel}.values():
                    closed += self.close(stream)
        return closed

    def _end(self, live: _Live) -> None:
        """It is computed no more."""
        request, asked = live.request, live.asked
        del self._live[request]
        asked.live.remove(live)
        if not request.for_cache:  # its token is nobody's
            asked.num_tokens += request.num_tokens_here
        if not asked.live:
            del self._asked[asked.stream]
            self._on_ended(RequestEnded(asked.request_id, asked.attempt, asked.num_tokens))

    def _send_unsent(self, live: _Live) -> None:
        request, log = live.request, live.request.logprobs
        delta = Delta(
            text=request.detokenizer.take(),
            token_ids=tuple(live.unsent),
            cached_tokens=request.cached_tokens or 0,
            finish_reason=request.finish_reason,
            logprobs=None if log is None else log.take_drawn(len(live.unsent)),
            prompt_logprobs=None if log is None else log.take_prompt(),
            choice=request.choice,
        )
        live.unsent.clear()
        self.send(live.asked.stream, delta)
