"""The fault kit's eyes: what it takes for a whole answer, and what not. No server of ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.e2e.faults import checks
from tests.e2e.faults.traffic import Outcome, Question, ask, clients

QUESTION = Question((1, 2, 3), 2)
DONE = b"data: [DONE]\n\n"


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _text(text: str, finish_reason: str | None = None) -> bytes:
    return _event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


ERROR = _event({"error": {"message": "m", "type": "server_error", "code": "too_many_deaths"}})


async def _answered(status: str, parts: list[bytes], *, is_cut: bool) -> Outcome:
    """What a client sees of an answer in chunks; cut = without the chunk that ends it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for part in parts:
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        if not is_cut:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, clients() as client:
        return await ask(client, f"http://127.0.0.1:{port}", QUESTION)


@pytest.mark.parametrize(
    ("status", "parts", "is_cut", "failure"),
    [
        ("200 OK", [_text("a"), _text("b", "length"), DONE], False, None),
        ("200 OK", [_text("a")], False, "truncated"),  # looks like success to most clients
        ("200 OK", [_text("a"), DONE], False, "truncated"),
        ("200 OK", [_text("a"), _text("b", "length")], False, "truncated"),
        ("200 OK", [_text("a"), ERROR], True, "event too_many_deaths"),
        ("200 OK", [_text("a"), ERROR, DONE], False, "event too_many_deaths"),
        ("429 Busy", [b'{"error": {"code": "server_busy", "type": "t"}}'], False, "status 429 server_busy"),
        ("502 Bad", [b"<html>"], False, "status 502 without an error object"),
    ],
)
async def test_an_answer_counts_only_when_it_is_whole(
    status: str, parts: list[bytes], is_cut: bool, failure: str | None
) -> None:
    outcome = await _answered(status, parts, is_cut=is_cut)
    assert outcome.failure == failure
    assert outcome.is_whole == (failure is None)
    assert outcome.is_cut == is_cut


async def test_a_cut_connection_is_an_error_and_not_silent() -> None:
    outcome = await _answered("200 OK", [_text("a")], is_cut=True)
    assert outcome.is_cut
    assert outcome.failure is not None
    assert outcome.failure != "truncated"
    assert checks.no_truncated_stream("x", [outcome]).is_kept


async def test_rows_are_missed_where_something_is_wrong() -> None:
    whole = await _answered("200 OK", [_text("a"), _text("b", "length"), DONE], is_cut=False)
    short = await _answered("200 OK", [_text("a")], is_cut=False)
    busy = await _answered("429 Busy", [b"{}"], is_cut=False)
    assert checks.zero_errors("x", [whole]).is_kept
    assert not checks.zero_errors("x", [whole, short]).is_kept
    assert not checks.zero_errors("x", []).is_kept  # nothing asked shows nothing
    assert not checks.no_truncated_stream("x", [whole, short]).is_kept
    assert checks.same_text("x", [whole], {QUESTION: "ab"}).is_kept
    assert not checks.same_text("x", [whole], {QUESTION: "ac"}).is_kept
    assert checks.same_text("x", [whole] * 99 + [short], {QUESTION: "ab"}, share=0.99).is_kept
    assert not checks.same_text("x", [whole] * 98 + [short] * 2, {QUESTION: "ab"}, share=0.99).is_kept
    assert checks.only_busy("x", [whole, busy]).is_kept
    assert not checks.only_busy("x", [whole, short]).is_kept
    assert not checks.at_most("x", float("nan"), 1.0).is_kept
