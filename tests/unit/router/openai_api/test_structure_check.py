"""Structures are tried once, in line, in time and by tenants' turns, before anything is queued for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from cache.structure import Structure
from router.errors import InvalidField, StructuresBusy
from router.openai_api import structure_check
from router.openai_api.structure_check import StructureChecker
from router.openai_api.structure_verdict import Refusal, judge
from tests.fakes.router import FakeClock
from tests.fakes.structures import deep_structures, regex, schema


async def test_what_is_deep_ends_no_process() -> None:
    """Its stack would overflow on a thread like any other."""
    checker = StructureChecker(60, 64)
    for structure in deep_structures(4000):
        await checker.check(structure, "guided_grammar")
    checker.close()


async def test_the_field_is_named_and_a_verdict_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Structure] = []

    def counted(structure: Structure) -> Refusal | None:
        asked.append(structure)
        return judge(structure)

    monkeypatch.setattr(structure_check, "judge", counted)
    checker = StructureChecker(5, 64)
    for _ in range(2):
        await checker.check(regex("a"), "guided_regex")
        with pytest.raises(InvalidField) as caught:
            await checker.check(schema({"items": {"uniqueItems": True}}), "response_format")
    assert caught.value.param == "response_format"
    assert (
        caught.value.message
        == "'response_format' cannot be followed at #/items: 'uniqueItems' cannot be enforced."
    )
    assert len(asked) == 2
    checker.close()


async def test_verdicts_are_bounded_in_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure_check, "MAX_REMEMBERED", 3)
    monkeypatch.setattr(structure_check, "MAX_REMEMBERED_BYTES", 10)
    checker = StructureChecker(5, 64)
    for source in ("a", "b", "c", "d"):
        await checker.check(regex(source), "x")
    assert len(checker._asked) == 3
    await checker.check(regex("e" * 9), "x")
    assert [structure.source for _, structure in checker._asked] == ["d", "e" * 9]
    checker.close()


async def test_who_takes_too_long_is_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(structure_check, "judge", lambda _structure: gate.wait(20) and None)
    checker = StructureChecker(0.05, 64)
    with pytest.raises(InvalidField, match=r"within 0\.05 seconds"):
        await checker.check(regex("a"), "guided_regex")
    waiting = asyncio.create_task(checker.check(regex("b"), "guided_regex"))
    gate.set()
    await waiting
    checker.close()


async def test_who_would_wait_behind_others_is_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is wrong with a structure that was not even tried, and what is to be tried is bounded."""
    gate = threading.Event()
    monkeypatch.setattr(structure_check, "judge", lambda _structure: gate.wait(20) and None)
    checker = StructureChecker(0.05, 3)
    asked = [asyncio.create_task(checker.check(regex(source), "guided_regex")) for source in "abc"]
    ended = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(error) for error in ended] == [InvalidField, InvalidField, StructuresBusy]
    with pytest.raises(StructuresBusy):
        await checker.check(regex("d"), "guided_regex")
    assert checker.statistics().num_pending == 3
    gate.set()
    await checker.check(regex("c"), "guided_regex")  # it was tried meanwhile
    await checker.check(regex("d"), "guided_regex")
    checker.close()


class _Compiling:
    """A thread for each structure that is let go by name, under a clock that stands still unless told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(structure_check, "NUM_THREADS", 1)
        monkeypatch.setattr(structure_check, "judge", self._judge)
        self.clock = FakeClock(0.0)
        self.checker = StructureChecker(_LIMIT_S, 64, clock=self.clock)
        self._gates = {name: threading.Event() for name in "ab"}
        self._begun = {name: threading.Event() for name in "ab"}

    def ask(self, name: str) -> asyncio.Task[None]:
        return asyncio.create_task(self.checker.check(regex(name), "guided_regex"))

    async def begun(self, name: str) -> None:
        assert await asyncio.to_thread(self._begun[name].wait, 20)

    def end(self, name: str) -> None:
        self._gates[name].set()

    def _judge(self, structure: Structure) -> None:
        self._begun[structure.source].set()
        assert self._gates[structure.source].wait(20)


_LIMIT_S = 0.01  # what the clock says of it counts; for so long the loop really sleeps


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Compiling]:
    compiling = _Compiling(monkeypatch)
    yield compiling
    for name in "ab":
        compiling.end(name)
    compiling.checker.close()


async def _behind_another(compiling: _Compiling) -> asyncio.Task[None]:
    """b, whose compile began when nearly all of the limit was gone since it came."""
    first, behind = compiling.ask("a"), compiling.ask("b")
    await compiling.begun("a")
    compiling.clock.now = 0.9 * _LIMIT_S
    compiling.end("a")
    await first
    await compiling.begun("b")
    compiling.clock.now = 1.8 * _LIMIT_S
    await asyncio.sleep(3 * _LIMIT_S)
    return behind


async def test_the_limit_runs_from_when_it_began(compiling: _Compiling) -> None:
    """Others' that were slow made a good schema a 400."""
    behind = await _behind_another(compiling)
    assert not behind.done()
    compiling.end("b")
    await asyncio.wait_for(behind, 20)


async def test_also_behind_others_there_is_a_limit(compiling: _Compiling) -> None:
    behind = await _behind_another(compiling)
    compiling.clock.now = 1.95 * _LIMIT_S
    with pytest.raises(InvalidField, match=r"within 0\.01 seconds"):
        await asyncio.wait_for(behind, 20)


async def test_who_asks_for_one_that_is_compiled_already_gets_what_is_left(compiling: _Compiling) -> None:
    first = compiling.ask("a")
    await compiling.begun("a")
    compiling.clock.now = 1.01 * _LIMIT_S
    for asked in (first, compiling.ask("a")):
        with pytest.raises(InvalidField, match="too complex"):
            await asyncio.wait_for(asked, 20)


async def test_who_waits_in_line_for_as_long_is_told_to_come_back(compiling: _Compiling) -> None:
    _first, behind = compiling.ask("a"), compiling.ask("b")
    await compiling.begun("a")
    compiling.clock.now = 1.01 * _LIMIT_S
    with pytest.raises(StructuresBusy):
        await asyncio.wait_for(behind, 20)
    await asyncio.gather(_first, return_exceptions=True)


async def test_a_verdict_that_is_there_is_taken(
    compiling: _Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread has ended, time is up, and the loop has not been told yet."""
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(asyncio, "wrap_future", lambda _verdict: loop.create_future())
    asked = compiling.ask("a")
    await asyncio.sleep(0)
    compiling.end("a")
    verdict = compiling.checker._asked["", regex("a")].verdict
    assert verdict.result(20) is None
    compiling.clock.now = 1.01 * _LIMIT_S
    await asyncio.wait_for(asked, 20)


class _Gated:
    """Instead of `judge`: follows everything, once it is let."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.tried: list[str] = []

    def __call__(self, structure: Structure) -> None:
        self.tried.append(structure.source)
        assert self.gate.wait(20)


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Gated]:
    gated = _Gated()
    monkeypatch.setattr(structure_check, "judge", gated)
    yield gated
    gated.gate.set()


async def test_tenants_take_turns_and_share_no_verdict(
    gated: _Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the time that an answer takes would tell what others ask for."""
    monkeypatch.setattr(structure_check, "NUM_THREADS", 1)
    checker = StructureChecker(5, 64)
    asked = [("alice", source) for source in "abcde"] + [("bob", "e"), ("bob", "f")]
    checks = [
        asyncio.create_task(checker.check(regex(source), "guided_regex", tenant)) for tenant, source in asked
    ]
    await asyncio.sleep(0)
    gated.gate.set()
    await asyncio.gather(*checks)
    assert gated.tried == list("abecfde")
    checker.close()


async def test_nobody_is_told_to_come_back_for_another_tenants_line(gated: _Gated) -> None:
    checker = StructureChecker(5, 4)
    alices = [asyncio.create_task(checker.check(regex(source), "x", "alice")) for source in "abcd"]
    await asyncio.sleep(0)
    bobs = asyncio.create_task(checker.check(regex("e"), "x", "bob"))
    with pytest.raises(StructuresBusy):
        await alices[3]
    with pytest.raises(StructuresBusy):
        await checker.check(regex("f"), "x", "alice")
    gated.gate.set()
    await asyncio.gather(bobs, *alices[:3])
    await checker.check(regex("d"), "x", "alice")
    assert sorted(gated.tried) == list("abcde")
    checker.close()


async def test_what_everybody_who_wanted_it_has_left_is_not_tried(gated: _Gated) -> None:
    checker = StructureChecker(5, 64)
    tasks = {
        name: asyncio.create_task(checker.check(regex(name[0]), "x", "alice"))
        for name in ("a", "b", "c1", "c2", "d", "e1", "e2")
    }
    await asyncio.sleep(0)
    for name in ("a", "d", "c1", "e1", "e2"):
        tasks.pop(name).cancel()
    await asyncio.sleep(0)
    assert checker.statistics().num_pending == 3  # a's thread is not free before it ends
    gated.gate.set()
    await asyncio.gather(*tasks.values())
    assert sorted(gated.tried) == ["a", "b", "c"]
    await checker.check(regex("d"), "x", "alice")  # somebody wants it again
    assert checker.statistics().num_pending == 0
    checker.close()


async def test_what_was_tried_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()

    def slow(structure: Structure) -> Refusal | None:
        clock.advance(1.0)
        return judge(structure)

    monkeypatch.setattr(structure_check, "judge", slow)
    checker = StructureChecker(5, 64, clock=clock)
    for _ in range(2):
        await checker.check(regex("a"), "x")
        with pytest.raises(InvalidField):
            await checker.check(regex("("), "x")
    told = checker.statistics()
    assert (told.num_followed, told.num_refused, told.num_pending) == (1, 1, 0)
    assert (sum(told.tried_s.counts), told.tried_s.total) == (2, 2.0)
    checker.close()


@pytest.mark.parametrize("error", [OverflowError("secret"), BaseException("secret")])
async def test_what_trying_trips_over_is_refused_logged_and_counted(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was a 500 for whoever asked again, too. A panic in Rust is no Exception."""

    clock = FakeClock()

    def trip(_structure: Structure) -> None:
        clock.advance(1.0)
        raise error

    monkeypatch.setattr(structure_check, "judge", trip)
    checker = StructureChecker(5, 64, clock=clock)
    for _ in range(2):
        with pytest.raises(InvalidField, match="'x' cannot be followed: it cannot be compiled"):
            await checker.check(regex("a"), "x")
    assert len(caplog.records) == 1
    assert caplog.records[0].message == "structure could not be tried"
    assert "secret" not in caplog.text
    told = checker.statistics()
    assert (told.num_followed, told.num_refused, told.num_pending) == (0, 1, 0)
    assert (sum(told.tried_s.counts), told.tried_s.total) == (1, 1.0)
    checker.close()


async def test_its_threads_end_with_it() -> None:
    checker = StructureChecker(5, 64)
    await checker.check(regex("a"), "x")
    threads = [thread for thread in threading.enumerate() if thread in checker._threads._pool._threads]
    assert threads
    checker.close()
    checker.close()
    for thread in threads:
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()
