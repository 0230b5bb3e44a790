"""What an engine says and does when a step fails, its thread dies or hangs, or it cannot start."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable
from typing import Any

import pytest

from cache.block_hash import BlockHasher
from cache.types import PinId
from replica.config import SimConfig
from replica.engine.engine import Engine
from replica.engine.engine_core import EngineCore
from replica.errors import (
    EngineStopped,
    ForwardFailed,
)
from replica.runners.sim_runner import SimRunner
from replica.scheduling.request import Request
from tests.fakes.engine import fingerprint, make_request, sim_config
from tests.fakes.running_engine import FAST, SLOW, collect, engine, eventually


async def test_a_failing_forward_fails_its_requests_and_the_engine_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        async with engine(sim=SimConfig(base_s=0.001, raise_every_steps=5)) as running:
            with pytest.raises(ForwardFailed):
                await collect(running, make_request("r", range(9), max_tokens=50))
            assert running.stats().cache.used == 0
            running.check_health()
            assert len(await collect(running, make_request("short", range(9), max_tokens=2))) >= 1
    assert len([r for r in caplog.records if r.exc_info]) == 1


async def test_a_bug_in_the_engine_thread_is_told_to_everyone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Callers get an error, health fails, and the cause is logged: nobody waits for a dead thread."""
    async with engine(sim=SLOW) as running:
        task = asyncio.create_task(collect(running, make_request("r", [1], max_tokens=500)))
        await eventually(lambda: running.load().num_running == 1)
        with caplog.at_level(logging.CRITICAL):
            monkeypatch.setattr(running._outbox, "record", lambda progress: 1 / 0)
            with pytest.raises(EngineStopped):
                await task
        with pytest.raises(EngineStopped, match="died"):
            running.check_health()
        with pytest.raises(EngineStopped):
            await collect(running, make_request("after", [1]))
    assert [r.message for r in caplog.records] == ["engine thread died"]


async def test_whoever_the_engine_thread_died_of_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had taken from the inbox was in neither of the places where it tells everybody."""

    async def ends(asked: Awaitable[object]) -> None:
        async with asyncio.timeout(5.0):
            with pytest.raises(EngineStopped):
                await asked

    async with engine() as running:
        monkeypatch.setattr(running._core, "take", lambda *_, **__: 1 / 0)
        await ends(collect(running, make_request("r", [1])))
    async with engine() as running:
        monkeypatch.setattr(running._core.pins, "release", lambda _: 1 / 0)
        await ends(running.unpin(PinId("p")))


async def test_a_runner_that_cannot_warm_up_stops_the_start() -> None:
    config = sim_config(sim=FAST)

    class Cold(SimRunner):
        def warm_up(self) -> float:
            raise RuntimeError("no such device")

    core = EngineCore(Cold(config.sim, block_size=4), config, BlockHasher(fingerprint()))
    before = set(threading.enumerate())
    broken = Engine(core, config)
    with pytest.raises(RuntimeError, match="no such device"):
        broken.start()
    broken.close()
    assert not set(threading.enumerate()) - before


async def test_a_hang_is_noticed_and_acted_on(caplog: pytest.LogCaptureFixture) -> None:
    release, hung = threading.Event(), threading.Event()

    def hang() -> None:
        release.wait()

    sim = SimConfig(base_s=0.001, hang_after_steps=2)
    with caplog.at_level(logging.CRITICAL):
        async with engine(sim=sim, step_time_limit_s=0.2, hang=hang, on_hang=hung.set) as running:
            task = asyncio.create_task(collect(running, make_request("r", [1], max_tokens=5)))
            await eventually(hung.is_set)
            release.set()
            await task
    [record] = [r for r in caplog.records if "stuck" in r.message]
    assert "_inject_faults" in record.getMessage()


async def test_a_thread_stuck_outside_of_its_steps_is_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is late then, the process answers, and nobody is ever served again."""
    monkeypatch.setattr("replica.engine.engine.OUTSIDE_STEP_LIMIT_S", 0.1)
    release, hung = threading.Event(), threading.Event()
    with caplog.at_level(logging.CRITICAL):
        async with engine(
            sim=FAST, step_time_limit_s=0.2, heartbeat_interval_s=0.05, on_hang=hung.set
        ) as running:
            monkeypatch.setattr(running._bulletins, "report_if_due", release.wait)
            await eventually(hung.is_set)
            monkeypatch.undo()
            release.set()
    [record] = [r for r in caplog.records if "stuck" in r.message]
    assert record.task == "taking requests in"  # type: ignore[attr-defined]


async def test_many_requests_that_are_taken_in_one_after_the_other_are_no_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those that another replica hands over at once: they had one limit together."""
    monkeypatch.setattr("replica.engine.engine.OUTSIDE_STEP_LIMIT_S", 0.3)
    hung = threading.Event()
    async with engine(
        sim=FAST, step_time_limit_s=0.2, heartbeat_interval_s=0.05, on_hang=hung.set
    ) as running:
        take = running._core.take

        def take_long(*args: Any, **kwargs: Any) -> list[Request]:
            time.sleep(0.05)
            return take(*args, **kwargs)

        monkeypatch.setattr(running._core, "take", take_long)
        await asyncio.gather(
            *(collect(running, make_request(f"r{index}", [1], max_tokens=1)) for index in range(16))
        )
    assert not hung.is_set()


async def test_where_full_steps_take_long_a_long_step_is_no_hang(caplog: pytest.LogCaptureFixture) -> None:
    config = sim_config(sim=SimConfig(base_s=0.3), step_time_limit_s=0.1)

    class Slow(SimRunner):
        def warm_up(self) -> float:
            return 0.25

    hung = threading.Event()
    core = EngineCore(Slow(config.sim, block_size=4), config, BlockHasher(fingerprint()))
    async with Engine(core, config, on_hang=hung.set) as running:
        await collect(running, make_request("r", [1], max_tokens=3))
    assert not hung.is_set()
    [record] = [r for r in caplog.records if "hung" in r.message]
    assert record.limit_s == 2.0  # type: ignore[attr-defined]


def test_a_hung_engine_ends_its_process() -> None:
    """Serve acts on a dead actor at once, so death is the signal; the cause is on stderr."""
    program = """
import asyncio
from tests.fakes.engine import *
from replica.engine.engine import Engine
config = sim_config(sim=SimConfig(hang_after_steps=1), step_time_limit_s=0.2)
runner = SimRunner(config.sim, block_size=4)
core = EngineCore(runner, config, BlockHasher(fingerprint()))
async def main():
    async with Engine(core, config) as engine:
        async for _ in engine.generate(make_request("r", [1], max_tokens=5)): pass
asyncio.run(main())
"""
    began_s = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 70
    assert "engine thread is stuck" in ended.stderr
    assert "_hang_forever" in ended.stderr
    assert time.monotonic() - began_s < 50


async def test_a_dead_engine_thread_tells_its_host_after_the_cause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    with caplog.at_level(logging.CRITICAL):
        async with engine(sim=SLOW, on_death=lambda: said.append(caplog.records[-1].message)) as running:
            monkeypatch.setattr(running._outbox, "record", lambda progress: 1 / 0)
            with pytest.raises(EngineStopped):
                await collect(running, make_request("r", [1], max_tokens=500))
    assert said == ["engine thread died"]
