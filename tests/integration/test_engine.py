"""The engine's thread beside a real event loop: streaming, cancelling, stopping, telling."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from typing import Any

import pytest

from cache.block_hash import BlockHasher, hints
from cache.engine_report import EngineReport
from cache.errors import HandedOver, LeftUnread, ServingError
from cache.events import EventBatch, RequestEnded
from cache.messages import Delta, FinishReason
from cache.types import RequestId
from replica.config import SimConfig
from replica.engine import stream as streams
from replica.engine.arrivals import Arrival
from replica.engine.stream import DeltaStream
from replica.errors import (
    DeadlineExceeded,
    EngineStopped,
    InvalidRequest,
    QueueFull,
    RequestRefused,
)
from tests.fakes.engine import TokenizersDecoder, fingerprint, make_request, sim_core
from tests.fakes.running_engine import SLOW, collect, engine, eventually


async def test_streams_equal_the_synchronous_engine() -> None:
    """Forty at once: each gets its own tokens and text, whole and in order."""
    requests = [
        make_request(f"r{i}", range(i, i + 30), max_tokens=20, seed=i, temperature=1.0) for i in range(40)
    ]
    alone = {r.request_id: sim_core(decoder=TokenizersDecoder()).complete([r])[0] for r in requests}
    async with engine() as running:
        streams = await asyncio.gather(*(collect(running, request) for request in requests))
        assert running.stats().cache.used == 0
    for request, deltas in zip(requests, streams, strict=True):
        expected = alone[request.request_id]
        assert tuple(t for d in deltas for t in d.token_ids) == expected.token_ids
        assert "".join(d.text for d in deltas) == expected.text
        assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_first_token_comes_at_once_and_the_rest_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One delta for the first token, then few: each costs the whole way through a handle."""
    sent: list[Delta] = []  # before a reader who is late is given several as one

    def receive(stream: DeltaStream, item: Delta | ServingError) -> None:
        assert isinstance(item, Delta)
        sent.append(item)
        take(stream, item)

    take = DeltaStream.receive
    monkeypatch.setattr(DeltaStream, "receive", receive)
    async with engine(sim=SimConfig(base_s=0.002), stream_interval_s=0.05) as running:
        await collect(running, make_request("r", range(9), max_tokens=100))
    assert len(sent[0].token_ids) == 1
    assert sum(len(d.token_ids) for d in sent) == 100
    assert len(sent) < 30
    sent.clear()
    async with engine(sim=SLOW, stream_interval_s=0.0) as running:
        await collect(running, make_request("r", range(9), max_tokens=5))
    assert [len(d.token_ids) for d in sent] == [1] * 5


async def test_a_consumer_that_does_not_read_does_not_hold_up_the_others() -> None:
    async with engine(stream_interval_s=0.0) as running:
        lazy = running.generate(make_request("lazy", range(9), max_tokens=200))
        first = await anext(lazy)
        await collect(running, make_request("busy", range(20, 29), max_tokens=200))
        rest = [delta async for delta in lazy]
    assert len(rest) == 1  # all that piled up
    assert len(first.token_ids) + len(rest[0].token_ids) == 200


def ended_in(batches: list[EventBatch]) -> list[RequestEnded]:
    return [ended for batch in batches for ended in batch.load.ended]


async def test_routers_hear_what_was_computed_whoever_has_read_it() -> None:
    """All answers of a request together, and none of what an earlier attempt has computed."""
    batches: list[EventBatch] = []
    async with engine(batches=batches, stream_interval_s=0.0) as running:
        read = replace(make_request("read", range(9), max_tokens=20), attempt=2)
        going_on = replace(read, request_id=RequestId("goes on"), token_ids=array("i", range(14)))
        unread = running.generate(replace(make_request("unread", range(9), max_tokens=30), n=3))
        await anext(unread)
        await collect(running, read)
        await collect(running, going_on)
        await eventually(lambda: len(ended_in(batches)) == 3)
        await unread.aclose()  # there is nothing left to end
    assert len(ended_in(batches)) == 3
    assert set(ended_in(batches)) == {
        RequestEnded(RequestId("goes on"), 2, 15),
        RequestEnded(RequestId("read"), 2, 20),
        RequestEnded(RequestId("unread"), 0, 90),
    }


async def test_a_prompt_computed_for_the_cache_alone_is_told_as_ended_with_no_token() -> None:
    """The one that its step drew is nobody's, and charged to nobody."""
    batches: list[EventBatch] = []
    async with engine(batches=batches) as running:
        await collect(running, replace(make_request("copy", range(9), max_tokens=1), for_cache=True))
        await eventually(lambda: bool(ended_in(batches)))
    assert ended_in(batches) == [RequestEnded(RequestId("copy"), 0, 0)]


async def test_routers_hear_what_was_computed_for_a_client_that_has_left() -> None:
    batches: list[EventBatch] = []
    async with engine(sim=SLOW, batches=batches, stream_interval_s=0.0) as running:
        leaving = running.generate(replace(make_request("r", range(9), max_tokens=500), n=2))
        await anext(leaving)
        await leaving.aclose()
        await eventually(lambda: bool(ended_in(batches)))
        num_computed = running.stats().output_tokens
    assert ended_in(batches) == [RequestEnded(RequestId("r"), 0, num_computed)]
    assert num_computed > 0


async def test_a_client_that_reads_nothing_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its answers, though nobody cancels; it is counted once."""
    monkeypatch.setattr(streams, "MAX_UNREAD_BYTES", 200)
    reports: list[EngineReport] = []
    async with engine(sim=SLOW, stream_interval_s=0.0, report=reports.append) as running:
        lazy = running.generate(replace(make_request("lazy", range(9), max_tokens=500), n=3))
        await anext(lazy)
        await eventually(lambda: running.stats().cache.used == 0)
        with pytest.raises(LeftUnread):
            await anext(lazy)
        await eventually(lambda: reports[-1].aborted == 3)
    assert reports[-1].left_unread == 1


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode"])
async def test_a_client_that_goes_away_frees_its_blocks(when: str) -> None:
    """Cancelled while waiting, in prefill or in decode: within a step, and nothing is left of it."""
    settings: dict[str, Any] = {"max_running": 1, "max_batched_tokens": 8, "stream_interval_s": 0.0}
    async with engine(sim=SLOW, **settings) as running:
        if when == "waiting":
            blocker = running.generate(make_request("blocker", [1], max_tokens=500))
            await anext(blocker)
        task = asyncio.create_task(
            collect(running, make_request("victim", range(200 if when == "prefill" else 4), max_tokens=500))
        )
        waiting = 1 if when == "waiting" else 0
        await eventually(lambda: (running.load().num_running, running.load().num_waiting) == (1, waiting))
        if when == "decode":
            await eventually(lambda: running.stats().output_tokens > 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        steps = running.stats().num_steps
        if when == "waiting":
            await eventually(lambda: running.load().num_waiting == 0)
            await blocker.aclose()
        await eventually(lambda: running.stats().cache.used == 0)
        assert running.stats().num_steps <= steps + 3


async def test_refusals_reach_the_caller_as_types() -> None:
    async with engine(sim=SLOW, max_running=1, max_waiting=1) as running:
        first = running.generate(make_request("first", [1], max_tokens=100))
        await anext(first)
        second = asyncio.create_task(collect(running, make_request("second", [2], max_tokens=1)))
        await eventually(lambda: (running.load().num_running, running.load().num_waiting) == (1, 1))
        with pytest.raises(QueueFull) as full:
            await collect(running, make_request("third", [3]))
        assert (full.value.waiting, full.value.limit) == (1, 1)
        with pytest.raises(InvalidRequest):
            await collect(running, make_request("bad", [-1]))
        await first.aclose()
        assert (await second)[-1].finish_reason is FinishReason.LENGTH
        with pytest.raises(DeadlineExceeded):
            await collect(running, make_request("late", [1], max_tokens=500, deadline_s=0.1))


async def test_a_refused_twin_id_does_not_cancel_its_owner() -> None:
    """The refused caller leaves; the request that bears the same id goes on."""
    async with engine(sim=SLOW) as running:
        owner = asyncio.create_task(collect(running, make_request("same", [1], max_tokens=10)))
        await eventually(lambda: running.load().num_running == 1)
        with pytest.raises(RequestRefused, match="being served here already"):
            await collect(running, make_request("same", [2]))
        assert sum(len(d.token_ids) for d in await owner) == 10


async def test_closing_ends_what_is_in_flight() -> None:
    async with engine(sim=SLOW) as running:
        task = asyncio.create_task(collect(running, make_request("r", [1], max_tokens=500)))
        await eventually(lambda: running.load().num_running == 1)
        await running.aclose()
        with pytest.raises(EngineStopped):
            await task
        await running.aclose()
        with pytest.raises(EngineStopped):
            await collect(running, make_request("after", [1]))
        with pytest.raises(EngineStopped):
            running.check_health()


async def test_batches_tell_admissions_changes_and_heartbeats() -> None:
    batches: list[EventBatch] = []
    async with engine(batches=batches, heartbeat_interval_s=0.05) as running:
        await collect(running, make_request("a", range(21), max_tokens=4))
        await eventually(lambda: bool(batches) and batches[-1].load.num_running == 0)
        first_idle = len(batches)
        await eventually(lambda: len(batches) >= first_idle + 3)
        await collect(running, make_request("b", range(21), max_tokens=4))
    assert [b.seq for b in batches] == list(range(1, len(batches) + 1))
    assert [r for b in batches for r in b.load.admitted] == ["a", "b"]
    beats = batches[first_idle : first_idle + 3]
    assert all(not b.stored and not b.removed for b in beats)
    stored = [h for b in batches for h in b.stored]
    # 21 prompt tokens and the first 3 outputs are computed: 6 full blocks, the last one only by `b` or `a`.
    assert len(stored) == len(set(stored)) == batches[-1].digest.count == 6
    admitted_first = next(b for b in batches if b.load.admitted)
    assert admitted_first.load.queued_uncached_tokens == 21  # told before its first step is computed


class Porter:
    """Hears of requests before the engine does."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.arrivals: list[Arrival] = []

    def arrived(self, arrival: Arrival) -> None:
        self.told.append(f"arrived {arrival.request_id}")
        self.arrivals.append(arrival)

    def refused(self, request_id: RequestId) -> None:
        self.told.append(f"refused {request_id}")

    def draining(self) -> None:
        self.told.append("draining")


async def test_the_door_hears_of_requests_during_a_step_and_of_refusals() -> None:
    porter, batches = Porter(), list[EventBatch]()
    hasher = BlockHasher(fingerprint())
    prompt = make_request("late", range(9), max_tokens=1)
    prompt = replace(prompt, block_hashes=tuple(hasher.chain(hasher.root(), prompt.token_ids)))
    async with engine(
        sim=SimConfig(base_s=0.3), door=porter, batches=batches, max_running=1, max_waiting=1
    ) as running:
        first = asyncio.create_task(collect(running, make_request("first", [1], max_tokens=2)))
        await eventually(lambda: running.load().num_running == 1)
        late = asyncio.create_task(collect(running, prompt))
        await asyncio.sleep(0)
        assert porter.told == ["arrived first", "arrived late"]  # and the engine is inside its step
        named = [name for batch in batches for name in batch.load.admitted]
        assert named == ["first"]
        with pytest.raises(QueueFull):
            await collect(running, make_request("too many", [1]))
        await asyncio.gather(first, late)
    assert porter.told[2:] == ["arrived too many", "refused too many"]
    assert porter.arrivals[1] == Arrival(prompt.request_id, 9, hints(prompt.block_hashes), 4)
    with pytest.raises(EngineStopped):
        await collect(running, make_request("closed", [1]))
    assert porter.told[-1] == "refused closed"


async def test_with_prompts_to_compute_every_step_of_ten_milliseconds_is_told_of() -> None:
    """Nothing enters or leaves the cache here, and still routers hear what is left to do."""
    batches: list[EventBatch] = []
    settings: dict[str, Any] = {"block_size": 128, "max_batched_tokens": 8, "heartbeat_interval_s": 60.0}
    async with engine(sim=SLOW, batches=batches, **settings) as running:
        await collect(running, make_request("r", range(96), max_tokens=1))
        assert running.stats().num_steps == 12
    queued = [batch.load.queued_uncached_tokens for batch in batches]
    assert set(queued) >= set(range(8, 97, 8))
    assert all(not batch.stored for batch in batches)


async def test_a_draining_engine_says_so_at_once_and_serves_on() -> None:
    porter, batches = Porter(), list[EventBatch]()
    async with engine(sim=SLOW, door=porter, batches=batches) as running:
        task = asyncio.create_task(collect(running, make_request("r", [1], max_tokens=8)))
        await eventually(lambda: running.load().num_running == 1)
        running.drain()
        assert porter.told[-1] == "draining"
        await eventually(lambda: batches[-1].load.is_draining)
        assert len(await task) > 0
        await collect(running, make_request("late", [1], max_tokens=2))
    assert all(batch.load.is_draining for batch in batches[-3:])


async def test_what_is_handed_over_keeps_every_token_it_got() -> None:
    """Another replica goes on from them: what is lost here would be computed again."""
    reports: list[EngineReport] = []
    batches: list[EventBatch] = []
    async with engine(
        sim=SimConfig(base_s=0.005), stream_interval_s=10.0, report=reports.append, batches=batches
    ) as running:
        got: list[int] = []

        async def read(name: str) -> None:
            async for delta in running.generate(make_request(name, [1], max_tokens=500)):
                got.extend(delta.token_ids)

        task = asyncio.create_task(read("r"))
        await eventually(lambda: running.stats().output_tokens > 10)
        running.hand_over()
        with pytest.raises(HandedOver):
            await task
        assert len(got) == running.stats().output_tokens
        with pytest.raises(HandedOver):
            await read("late")
        running.check_health()
        assert running.load().num_running == 0
        await eventually(lambda: reports[-1].handed_over == 1)
        assert reports[-1].aborted == 0
        await eventually(lambda: bool(ended_in(batches)))
    assert ended_in(batches) == [RequestEnded(RequestId("r"), 0, len(got))]
