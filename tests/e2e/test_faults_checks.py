"""The fault kit's eyes: what it takes for a whole answer, and what not. No server of ours."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import deploy.environment
from deploy.ports import Ports
from tests.e2e.faults import __main__ as command
from tests.e2e.faults import checks, drivers, fleet, memory
from tests.e2e.faults.checks import Row
from tests.e2e.faults.promises import replica_deaths
from tests.e2e.faults.run import status, summary
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
        ("502 Bad", [b"<html>"], False, "status 502 without an error object: b'<html>'"),
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


# --- memory ---------------------------------------------------------------------------------------

MIB = 1 << 20
RUN_S = 600.0


def _sampled(size_mib: Callable[[float], float], seconds: float = RUN_S) -> list[tuple[float, int]]:
    return [(float(at), round(size_mib(at) * MIB)) for at in range(0, int(seconds) + 1, 2)]


def _memory(samples: list[tuple[float, int]]) -> Row:
    return checks.memory_slope("x", samples, mib_per_minute=2.0, least_s=300.0)


@pytest.mark.parametrize(
    ("size_mib", "is_kept"),
    [
        (lambda at: 300.0, True),
        (lambda at: 300.0 + min(at, 150.0), True),  # warming up: only before the first third has passed
        (lambda at: 300.0 + 20.0 * (at % 30) / 30, True),  # collected twice a minute
        (lambda at: 300.0 - at / 60, True),
        (lambda at: 300.0 + 1.9 * at / 60, True),
        (lambda at: 300.0 + 2.1 * at / 60, False),
        (lambda at: 300.0 + 3.0 * at / 60 + 20.0 * (at % 30) / 30, False),  # what grows between collections
    ],
    ids=["flat", "warm-up", "sawtooth", "shrinking", "below", "above", "growing sawtooth"],
)
def test_memory_is_judged_by_what_stays(size_mib: Callable[[float], float], is_kept: bool) -> None:
    assert _memory(_sampled(size_mib)).is_kept is is_kept


def test_a_slope_is_told_in_mib_a_minute() -> None:
    assert _memory(_sampled(lambda at: 300.0 + 3.0 * at / 60)).measured == "3 MiB/min"


def test_memory_of_a_run_too_short_for_a_slope_is_not_told() -> None:
    row = _memory(_sampled(lambda at: 300.0 + at, seconds=298.0))
    assert (row.is_kept, row.measured) == (None, "not told, run shorter than 5 minutes")
    assert row.is_run  # it is no promise that could not be tried


def test_memory_of_nobody_is_a_miss() -> None:
    assert _memory([]).is_kept is False


def test_only_who_lives_all_the_time_counts_into_memory() -> None:
    """A process that dies would pass for memory given back, and hide what the others take."""
    sizes = {1: 100, 2: 50, 3: 70, 4: 1000}
    clock = iter([0.0, 2.0, 4.0])
    watch = memory.MemoryWatch(
        {"Routers": [1, 2], "proxies": [3], "Serve's controller": [4]},
        size_of=lambda pid: sizes[pid],
        clock=lambda: next(clock),
    )
    watch.look()
    sizes[2] = 0  # gone
    sizes[1] += 10
    watch.look()
    watch.look()
    assert watch.samples("Routers", "proxies") == [(0.0, 170), (2.0, 180), (4.0, 180)]
    assert watch.samples("Serve's controller") == [(0.0, 1000), (2.0, 1000), (4.0, 1000)]


def test_each_roles_part_stands_beside_what_all_grow_by() -> None:
    now = 0.0
    watch = memory.MemoryWatch(
        {"Routers": [1], "proxies": [2], "Serve's controller": [3]},
        size_of=lambda pid: round((100 + pid * now / 60) * MIB),
        clock=lambda: now,
    )
    while now <= RUN_S:
        watch.look()
        now += 10.0
    row = memory.row("x", watch)
    assert row.measured == "3 MiB/min (Routers 1, proxies 2, Serve's controller 3)"
    assert row.is_kept is False


# --- the last line, and how it ends ---------------------------------------------------------------

KEPT, MISSED = Row("a", "t", "m", True), Row("b", "t", "m", False)
TOLD, NOT_RUN = Row("c", "said, not promised", "m", None), checks.not_run("d", "t", "no redis-server")


@pytest.mark.parametrize(
    ("rows", "said", "ended", "strictly"),
    [
        ([KEPT, TOLD], "2 promises, none missed", 0, 0),
        ([KEPT, TOLD, NOT_RUN], "2 promises, none missed; 1 not run", 0, 1),
        ([KEPT, MISSED, NOT_RUN], "1 of 2 promises missed; 1 not run", 1, 1),
    ],
)
def test_what_could_not_be_tried_is_counted_apart(
    rows: list[Row], said: str, ended: int, strictly: int
) -> None:
    assert (summary(rows), status(rows), status(rows, strict=True)) == (said, ended, strictly)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_who_ends_it_early_gets_the_rows_that_there_are(
    sent: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def an_hour(
        _names: Iterable[str], _seconds: float, _console: Console, rows: list[Row]
    ) -> list[Row]:
        rows.append(KEPT)
        os.kill(os.getpid(), sent)
        await asyncio.sleep(3600)
        return rows

    monkeypatch.setattr(command, "run_all", an_hour)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        ended = command.main(["routers"])
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    said = capsys.readouterr().out
    assert ended == command.INTERRUPTED
    assert "kept" in said
    assert "interrupted: 1 promises, none missed until then" in said


def test_drivers_have_short_paths_whatever_the_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HAProxy binds sockets in the run folder, and does not start where their paths are too long."""
    folders: list[Path] = []

    def environment(_ports: Ports, folder: Path, **_settings: object) -> dict[str, str]:
        folders.append(folder)
        raise KeyboardInterrupt

    long = tmp_path / ("x" * 40)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(deploy.environment, "serve_environment", environment)
    with pytest.raises(KeyboardInterrupt):
        drivers.serve(["serve", "deploy.yaml", "--port", "9000"], variables={}, prepare=lambda: None)
    assert [folder.parent for folder in folders] == [Path("/tmp")]


@pytest.mark.parametrize(
    ("num_computed", "is_kept"),
    [(4, True), (5, True), (6, False), (0, False)],  # 4 prefixes, and 6 streams that had a token of them
    ids=["each once", "half of those who share one again", "all again", "nothing is no measurement"],
)
def test_a_fleet_that_computes_all_streams_again_is_told_from_one_that_shares(
    num_computed: int, is_kept: bool
) -> None:
    questions = fleet.questions()  # all prefixes once, then again
    asked = [*questions[:4], *questions[fleet.PREFIXES : fleet.PREFIXES + 2]]
    death = replica_deaths.Death(0.0, tuple(Outcome(question, 0.0) for question in asked), 5.0)
    sent = fleet.PREFIX_TOKENS + fleet.TAIL_TOKENS + fleet.MAX_TOKENS // 2
    after = {
        'warmpath_continued_tokens_total{source="computed"}': float(num_computed * sent),
        'warmpath_continued_tokens_total{source="cached"}': float((len(asked) - num_computed) * sent),
        "warmpath_continuations_total": float(len(asked)),
    }
    row = replica_deaths.replay(dict.fromkeys(after, 0.0), after, [death])
    assert row.is_kept is is_kept


@pytest.mark.parametrize(
    ("token_times", "deaths_s", "outlives"),
    [
        ([], [], True),
        ([], [9.0], True),  # before it came
        ([], [11.0], False),
        ([10.5], [11.0], False),
        ([10.5, 11.2], [11.0], False),  # maybe of the one that died
        ([10.5, 11.6], [9.0, 11.0], True),
        ([10.5, 11.6, 13.0], [11.0, 12.0], False),
    ],
    ids=["nothing died", "came later", "no token", "none since", "just after", "went on", "a third"],
)
def test_no_replica_is_killed_under_whom_that_would_rightly_end(
    token_times: list[float], deaths_s: list[float], outlives: bool
) -> None:
    outcome = Outcome(QUESTION, 10.0, token_times=token_times)
    assert replica_deaths.outlives_another(outcome, deaths_s) is outlives
