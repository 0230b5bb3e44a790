"""Sends questions and reads the answers: `Asker` blocks (locust's users), `AsyncAsker` does not.

Both end in an `Answer`, whatever the server does: only a programming error raises. A question that meets a
connection which the server has closed since its last answer is asked again: that is no failure, and its time
goes on. Knows httpx.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from loadtest.client.answer import Answer, AnswerReader
from loadtest.client.attempt import Attempt, failure_of
from loadtest.client.endpoint import Endpoint
from loadtest.client.question import Question

TIMEOUT_S = 300.0
TIMEOUT_HELP = "to an answer's first event, and from each to the next; comments are none"
CONNECT_TIMEOUT_S = 30.0
# Idle connections are kept for less than servers keep them: uvicorn's 5 s are httpx's own as well, and a
# question that meets a connection on its way to be closed would be the server's failure.
KEEP_IDLE_S = 2.0


class Asker:
    """One user's connection, kept open between questions."""

    def __init__(self, endpoint: Endpoint, timeout_s: float = TIMEOUT_S) -> None:
        self._endpoint, self._timeout_s = endpoint, timeout_s
        limits = httpx.Limits(keepalive_expiry=KEEP_IDLE_S)
        self._client = httpx.Client(timeout=_timeouts(timeout_s), limits=limits)

    def close(self) -> None:
        self._client.close()

    def ask(self, question: Question) -> Answer:
        reader = AnswerReader(time.perf_counter(), num_choices=question.num_choices)
        request = _request(self._endpoint, question)
        while True:
            attempt = Attempt()
            try:
                with self._client.stream("POST", **request, extensions={"trace": attempt.told}) as answer:
                    reader.began(answer.status_code, answer.headers)
                    for piece in answer.iter_raw():
                        reader.feed(piece, time.perf_counter())
                        # httpx counts from the last byte, and a comment is some.
                        if reader.silent_s(time.perf_counter()) > self._timeout_s:
                            raise httpx.ReadTimeout(_silent(self._timeout_s))
            except httpx.HTTPError as error:
                if attempt.met_closed_connection(error):
                    continue
                return reader.broke(failure_of(error), _problem(error), time.perf_counter())
            return reader.finished(time.perf_counter())


class AsyncAsker:
    """Any number of questions at a time, over as many connections as it takes."""

    def __init__(self, endpoint: Endpoint, timeout_s: float = TIMEOUT_S) -> None:
        self._endpoint, self._timeout_s = endpoint, timeout_s
        # No limit: a client that queues for its own connections measures itself.
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_IDLE_S
        )
        self._client = httpx.AsyncClient(timeout=_timeouts(timeout_s), limits=limits)

    async def __aenter__(self) -> Self:
        # httpx loads half of itself with a first request, on a cold disk for a second: nobody's first token.
        with suppress(httpx.HTTPError):
            await self._client.get(f"{self._endpoint.url}/v1/models", timeout=CONNECT_TIMEOUT_S)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def ask(self, question: Question) -> Answer:
        reader = AnswerReader(time.perf_counter(), num_choices=question.num_choices)
        request = _request(self._endpoint, question)
        while True:
            attempt = Attempt()
            try:
                async with (
                    asyncio.timeout(None) as silence,
                    self._client.stream("POST", **request, extensions={"trace": attempt.atold}) as answer,
                ):
                    reader.began(answer.status_code, answer.headers)
                    self._allow(silence, reader)
                    async for piece in answer.aiter_raw():
                        reader.feed(piece, time.perf_counter())
                        self._allow(silence, reader)
            except TimeoutError:
                error: httpx.HTTPError = httpx.ReadTimeout(_silent(self._timeout_s))
            except httpx.HTTPError as met:
                if attempt.met_closed_connection(met):
                    continue
                error = met
            else:
                return reader.finished(time.perf_counter())
            return reader.broke(failure_of(error), _problem(error), time.perf_counter())

    def _allow(self, silence: asyncio.Timeout, reader: AnswerReader) -> None:
        """From the first head on: httpx counts from the last byte, and a comment is some."""
        left_s = self._timeout_s - reader.silent_s(time.perf_counter())
        silence.reschedule(asyncio.get_running_loop().time() + left_s)


def _request(endpoint: Endpoint, question: Question) -> dict[str, Any]:
    """httpx's arguments."""
    headers = {
        **endpoint.headers(question),
        "content-type": "application/json",
        "accept": "text/event-stream",
        "accept-encoding": "identity",  # a compressed stream would come when its compressor likes
    }
    return {
        "url": endpoint.url + question.path,
        "headers": headers,
        "content": msgspec.json.encode(endpoint.body(question)),
    }


def _timeouts(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)


def _silent(timeout_s: float) -> str:
    return f"nothing of the answer for {timeout_s:g} s"


def _problem(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
