"""How often the engine's thread speaks while it decodes, on a clock that only its steps move."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest

from cache.block_hash import BlockHasher
from cache.event_log import EventLog
from cache.events import EventBatch
from cache.messages import Delta
from replica.config import SimConfig
from replica.engine.bulletins import DECODE_LOAD_INTERVAL_S, LOAD_INTERVAL_S
from replica.engine.engine import Engine
from replica.engine.engine_core import EngineCore
from replica.runners.sim_runner import SimRunner
from tests.fakes.engine import TokenizersDecoder, VirtualClock, fingerprint, make_request, sim_config

PROMPT = range(100, 150)
_TURNS = 20  # of the event loop: enough for a delta to go through every generator


def stepwise(clock: VirtualClock, loop: asyncio.AbstractEventLoop) -> Callable[[float], None]:
    """A step's sleep that first lets the event loop read all that was handed over."""

    async def turns() -> None:
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    def sleep(seconds: float) -> None:
        asyncio.run_coroutine_threadsafe(turns(), loop).result(timeout=10.0)
        clock.sleep(seconds)

    return sleep


async def served(
    step_s: float, num_tokens: int, *, interval_s: float = 0.04, max_batched_tokens: int = 512
) -> tuple[list[Delta], list[EventBatch]]:
    """One answer to PROMPT: its deltas, and every batch from the one that admits it."""
    sim = SimConfig(base_s=step_s, per_token_s=0.0, per_attention_s=0.0, per_sequence_s=0.0)
    config = sim_config(
        256,
        sim=sim,
        stream_interval_s=interval_s,
        heartbeat_interval_s=60.0,
        max_batched_tokens=max_batched_tokens,
    )
    clock, batches = VirtualClock(), list[EventBatch]()
    events = EventLog(epoch=1, clock=clock)
    core = EngineCore(
        SimRunner(
            config.sim, block_size=config.block_size, sleep=stepwise(clock, asyncio.get_running_loop())
        ),
        config,
        BlockHasher(fingerprint(config.block_size)),
        decoder=TokenizersDecoder(),
        sink=events,
        clock=clock,
    )
    async with Engine(core, config, events=events, publish=batches.append, clock=clock) as engine:
        request = make_request("r", PROMPT, max_tokens=num_tokens)
        deltas = [delta async for delta in engine.generate(request)]
    began = next(index for index, batch in enumerate(batches) if batch.load.admitted)
    return deltas, batches[began:]


@pytest.mark.parametrize(
    ("step_s", "sizes"),
    [
        (0.006, [1, *[6] * 16, 3]),  # a seventh would make it 42 ms
        (0.018, [1, *[2] * 49, 1]),
        (0.021, [1] * 100),  # a second
        (0.5, [1] * 100),
    ],
)
async def test_pieces_come_no_further_apart_than_the_interval(step_s: float, sizes: list[int]) -> None:
    """The first token leaves at once; a slow model's stream is not made any slower."""
    deltas, _ = await served(step_s, 100)
    assert [len(delta.token_ids) for delta in deltas] == sizes


async def test_an_interval_of_nothing_sends_every_token() -> None:
    deltas, _ = await served(0.005, 20, interval_s=0.0)
    assert [len(delta.token_ids) for delta in deltas] == [1] * 20


async def test_the_blocks_of_a_prompt_are_told_by_the_step_that_computed_them() -> None:
    """Another Router's twin of it may come in the next moment."""
    _, batches = await served(0.005, 40)
    admitted, computed, *_ = batches
    assert admitted.load.admitted == ("r",)
    assert admitted.load.queued_uncached_tokens == len(PROMPT)
    assert computed.sent_s - admitted.sent_s == pytest.approx(0.005)
    assert computed.load.queued_uncached_tokens == 0
    num_blocks = len(PROMPT) // sim_config().block_size
    assert len(admitted.stored) + len(computed.stored) == num_blocks > 0


async def test_a_prompt_in_many_steps_is_told_as_it_goes() -> None:
    _, batches = await served(0.02, 5, max_batched_tokens=8)
    queued = [batch.load.queued_uncached_tokens for batch in batches]
    assert queued[:7] == [50, 42, 34, 26, 18, 10, 2]
    assert all(
        later.sent_s - sooner.sent_s >= LOAD_INTERVAL_S for sooner, later in itertools.pairwise(batches[:7])
    )


async def test_while_only_decoding_routers_hear_of_it_now_and_then() -> None:
    """Each batch costs every Router as much as a piece of an answer; what is cached comes with the next."""
    _, batches = await served(0.005, 400)
    decoding = batches[1:-1]
    assert len(decoding) >= 30
    for sooner, later in itertools.pairwise(decoding):
        assert later.sent_s - sooner.sent_s >= DECODE_LOAD_INTERVAL_S - 1e-9
    assert batches[-1].load.num_running == 0  # told at once when it ends
    assert batches[-1].sent_s - decoding[-1].sent_s <= DECODE_LOAD_INTERVAL_S
    num_stored = sum(len(batch.stored) for batch in batches)
    assert num_stored == (len(PROMPT) + 400 - 1) // sim_config().block_size
