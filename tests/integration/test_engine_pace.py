"""How often the engine's thread speaks while it decodes, on a clock that only its steps move."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cache.block_hash import BlockHasher
from cache.event_log import EventLog
from cache.events import EventBatch
from cache.messages import Delta, GenerateRequest
from cache.types import RequestId
from replica.config import SimConfig
from replica.engine.arrivals import Arrival
from replica.engine.bulletins import DECODE_LOAD_INTERVAL_S, LOAD_INTERVAL_S
from replica.engine.engine import Engine
from replica.engine.engine_core import EngineCore
from replica.engine.inbox import Message
from replica.runners.sim_runner import SimRunner
from replica.scheduling.request import Request
from tests.fakes.engine import TokenizersDecoder, VirtualClock, fingerprint, make_request, sim_config
from tests.fakes.running_engine import collect, eventually

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


class Flooded:
    """An engine whose clock its steps move, and taking a request in: two milliseconds each. Its door, too."""

    STEP_S, TAKE_S = 0.02, 0.002

    def __init__(self) -> None:
        self.clock, self.steps_s = VirtualClock(), list[float]()
        self.taken: dict[str, int] = {}  # after how many steps
        self.cancelled: dict[str, int] = {}  # likewise
        self.withdrawn: list[str] = []
        self.on_taken: Callable[[str], None] = lambda _: None  # on the engine thread
        sim = SimConfig(base_s=self.STEP_S, per_token_s=0.0, per_attention_s=0.0, per_sequence_s=0.0)
        config = sim_config(1024, sim=sim, stream_interval_s=0.0, heartbeat_interval_s=60.0)
        core = EngineCore(
            SimRunner(config.sim, block_size=config.block_size, sleep=self._step),
            config,
            BlockHasher(fingerprint(config.block_size)),
            decoder=TokenizersDecoder(),
            clock=self.clock,
        )
        self._turns = stepwise(self.clock, asyncio.get_running_loop())
        self._take, core.take = core.take, self._taking  # type: ignore[method-assign]
        self._cancel, core.cancel = core.cancel, self._cancelling  # type: ignore[method-assign]
        self.engine = Engine(core, config, clock=self.clock, door=self)

    def ask(self, name: str, max_tokens: int) -> asyncio.Task[list[Delta]]:
        return asyncio.create_task(collect(self.engine, make_request(name, PROMPT, max_tokens=max_tokens)))

    def arrived(self, arrival: Arrival) -> None: ...

    def refused(self, request_id: RequestId) -> None:
        self.withdrawn.append(request_id)

    def draining(self) -> None: ...

    def _step(self, seconds: float) -> None:
        self.steps_s.append(self.clock())
        self._turns(seconds)

    def _taking(self, request: GenerateRequest, **how: Any) -> list[Request]:
        self.taken[request.request_id] = len(self.steps_s)
        self.clock.sleep(self.TAKE_S)
        self.on_taken(request.request_id)
        return self._take(request, **how)

    def _cancelling(self, request_id: RequestId) -> Request | None:
        self.cancelled[request_id] = len(self.steps_s)
        return self._cancel(request_id)


async def test_in_a_flood_of_requests_answers_go_on() -> None:
    """All were taken in before the next step: forty of them made a gap five times as long."""
    flooded = Flooded()
    async with flooded.engine:
        going_on = flooded.ask("going on", 60)
        await eventually(lambda: len(flooded.steps_s) >= 3)
        names = [f"{number}" for number in range(40)]
        answers = await asyncio.gather(*[flooded.ask(name, 1) for name in names])
        assert [len(deltas) for deltas in answers] == [1] * 40
        await going_on
    assert list(flooded.taken) == ["going on", *names]
    longest_s = max(later - sooner for sooner, later in itertools.pairwise(flooded.steps_s))
    assert longest_s <= 1.25 * flooded.STEP_S + flooded.TAKE_S
    assert flooded.taken["39"] - flooded.taken["0"] <= 40 / 3  # nor does the flood wait for long


async def test_who_leaves_in_a_flood_has_left_before_the_next_step() -> None:
    flooded, left_at = Flooded(), list[int]()
    async with flooded.engine as engine:
        going_on, stays = flooded.ask("going on", 1000), flooded.ask("stays", 60)
        await eventually(lambda: engine.load().num_running == 2)
        flood = [flooded.ask(f"{number}", 1) for number in range(40)]

        def leave() -> None:
            left_at.append(len(flooded.steps_s))
            going_on.cancel()
            flood[-1].cancel()

        loop = asyncio.get_running_loop()
        flooded.on_taken = lambda name: loop.call_soon_threadsafe(leave) if name == "5" else None
        await asyncio.gather(*flood, stays, going_on, return_exceptions=True)
        await eventually(lambda: engine.stats().cache.used == 0)
    # In the middle of the step that was to come, or just before it.
    assert flooded.cancelled["going on"] <= left_at[0] + 1
    assert flooded.withdrawn == ["39"]
    assert list(flooded.taken) == ["going on", "stays", *[f"{number}" for number in range(39)]]


async def test_while_nobody_is_answered_a_burst_is_seen_whole() -> None:
    """Whoever of it is shortest goes first; however long nobody came before."""
    flooded, is_posted = Flooded(), threading.Event()
    flooded.on_taken = lambda _: assert_set(is_posted)
    inbox = flooded.engine._inbox
    take = inbox.take

    def take_late(timeout_s: float) -> Iterator[Message]:
        flooded.clock.sleep(1.0)
        yield from take(timeout_s)

    inbox.take = take_late  # type: ignore[method-assign]
    async with flooded.engine:
        burst = [flooded.ask(f"{number}", 1) for number in range(20)]
        await asyncio.sleep(0)
        is_posted.set()
        await asyncio.gather(*burst)
    assert set(flooded.taken.values()) == {0}


def assert_set(event: threading.Event) -> None:
    assert event.wait(timeout=10.0)


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
