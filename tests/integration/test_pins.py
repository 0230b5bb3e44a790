"""Pins on a running engine: held across its thread, told to Routers before whoever asked is answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cache.block_hash import BlockHasher
from cache.engine_report import EngineReport
from cache.errors import HandedOver, PinsFull
from cache.messages import Delta, FinishReason
from cache.types import PinId
from replica.config import SimConfig
from replica.engine.engine import Engine
from replica.engine.engine_core import EngineCore
from replica.errors import EngineStopped
from replica.runners.sim_runner import SimRunner
from tests.fakes.engine import BLOCK_SIZE, TokenizersDecoder, fingerprint, make_pin, make_request, sim_config

FAST = SimConfig(base_s=0.0005, per_token_s=0.0, per_attention_s=0.0, per_sequence_s=0.0)
PREFIX = list(range(5 * BLOCK_SIZE))


@contextlib.asynccontextmanager
async def an_engine(reports: list[EngineReport], **settings: Any) -> AsyncIterator[Engine]:
    config = sim_config(64, sim=FAST, max_model_len=100, heartbeat_interval_s=0.05, **settings)
    runner = SimRunner(config.sim, block_size=config.block_size)
    core = EngineCore(runner, config, BlockHasher(fingerprint()), decoder=TokenizersDecoder())
    async with Engine(core, config, report=reports.append) as running:
        yield running


async def hold(engine: Engine, name: str = "p", **options: Any) -> list[Delta]:
    return [delta async for delta in engine.generate(make_pin(name, PREFIX, **options))]


async def test_who_asked_hears_nothing_but_that_it_is_held() -> None:
    """And every Router has heard of it by then: its report left before the answer."""
    reports: list[EngineReport] = []
    async with an_engine(reports) as engine:
        (delta,) = await hold(engine)
        assert (delta.text, delta.token_ids, delta.finish_reason) == ("", (), FinishReason.LENGTH)
        assert [pin.pin_id for pin in reports[-1].pins] == ["p"]
        answer = [each async for each in engine.generate(make_request("r", [*PREFIX, 1]))]
        assert answer[0].cached_tokens == len(PREFIX)


async def test_it_is_given_back_when_told_or_when_its_time_is_over() -> None:
    reports: list[EngineReport] = []
    async with an_engine(reports) as engine:
        await hold(engine, "p")
        await hold(engine, "q", seconds=0.05)
        assert await engine.unpin(PinId("p"))
        assert not await engine.unpin(PinId("p"))
        async with asyncio.timeout(20):
            while reports[-1].pins or engine.load().free_blocks < 64:  # noqa: ASYNC110  # nor has it an event
                await asyncio.sleep(0.01)


async def test_of_several_routers_that_would_keep_it_the_first_gets_it_and_its_tokens() -> None:
    reports: list[EngineReport] = []
    async with an_engine(reports) as engine:
        await hold(engine, salt="alice's")
        assert reports[-1].pins[0].keeper == "router0"
        held = await engine.inherit(PinId("p"), keeper="router0", heir="router1")
        assert held is not None
        assert (list(held.token_ids), held.cache_salt) == (PREFIX, "alice's")
        assert reports[-1].pins[0].keeper == "router1"  # before the answer
        assert await engine.inherit(PinId("p"), keeper="router0", heir="router2") is None
        assert reports[-1].pins[0].keeper == "router1"
        assert await engine.inherit(PinId("p"), keeper="router0", heir="router1") == held  # asked twice
        assert await engine.inherit(PinId("no such pin"), keeper="router0", heir="router1") is None


async def test_a_refusal_reaches_who_asked() -> None:
    async with an_engine([], max_pinned_fraction=0.05) as engine:
        with pytest.raises(PinsFull) as caught:
            await hold(engine)
        assert (caught.value.needed, caught.value.left) == (5, 3)


async def test_a_replica_that_leaves_holds_nothing_new() -> None:
    async with an_engine([]) as engine:
        engine.drain()
        with pytest.raises(HandedOver):
            await hold(engine)


async def test_a_stopped_engine_says_so() -> None:
    async with an_engine([]) as engine:
        await hold(engine)
    with pytest.raises(EngineStopped):
        await engine.unpin(PinId("p"))
    with pytest.raises(EngineStopped):
        await engine.inherit(PinId("p"), "router0", "router1")
