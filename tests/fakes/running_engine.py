"""An engine whose thread runs beside the test's event loop, on a simulated model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from cache.block_hash import BlockHasher
from cache.engine_report import EngineReport
from cache.event_log import EventLog
from cache.events import EventBatch
from cache.messages import Delta, GenerateRequest
from replica.config import SimConfig
from replica.engine.door import Door
from replica.engine.engine import Engine
from replica.engine.engine_core import EngineCore
from replica.runners.sim_runner import SimRunner
from tests.fakes.engine import TokenizersDecoder, fingerprint, sim_config

FAST = SimConfig(base_s=0.0005, per_token_s=0.0, per_attention_s=0.0, per_sequence_s=0.0)
SLOW = SimConfig(base_s=0.02, per_token_s=0.0, per_attention_s=0.0, per_sequence_s=0.0)


@asynccontextmanager
async def engine(
    num_blocks: int = 256,
    *,
    sim: SimConfig = FAST,
    on_hang: Callable[[], None] | None = None,
    on_death: Callable[[], None] | None = None,
    hang: Callable[[], None] | None = None,
    batches: list[EventBatch] | None = None,
    door: Door | None = None,
    report: Callable[[EngineReport], None] | None = None,
    **settings: Any,
) -> AsyncIterator[Engine]:
    config = sim_config(num_blocks, sim=sim, **settings)
    events = EventLog(epoch=1)
    core = EngineCore(
        SimRunner(config.sim, block_size=config.block_size, hang=hang),
        config,
        BlockHasher(fingerprint(config.block_size)),
        decoder=TokenizersDecoder(),
        sink=events,
    )
    publish = None if batches is None else batches.append
    async with Engine(
        core,
        config,
        events=events,
        publish=publish,
        report=report,
        door=door,
        on_hang=on_hang,
        on_death=on_death,
    ) as running:
        yield running


async def collect(running: Engine, request: GenerateRequest) -> list[Delta]:
    return [delta async for delta in running.generate(request)]


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what the engine thread reports has no event to wait for
            await asyncio.sleep(0.002)
