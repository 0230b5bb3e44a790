"""The parts put together: when a Router is ready, and what its metrics say."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from cache.messages import ReplicaInfo
from cache.types import ReplicaId
from router.assembly import SNAPSHOT_LIMIT_S, RouterParts
from router.config import RouterConfig
from router.metrics import RouterMetrics
from router.openai_api.schema import parse_completion
from router.prompts.prompt import PromptEncoder
from router.prompts.segment_cache import CacheStatistics
from tests.fakes.http import FINGERPRINT, MODEL, ByteTokenizer, ScriptedReplicas, a_replica_info
from tests.fakes.router import FakeClock

REPLICAS = {ReplicaId(name): a_replica_info() for name in ("a", "b")}


class FakeSubscribers:
    """Says who is synced."""

    def __init__(self) -> None:
        self.synced: set[str] = set()

    def is_synced(self, replica_id: ReplicaId) -> bool:
        return replica_id in self.synced


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def parts(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> AsyncIterator[RouterParts]:
    made = RouterParts(
        RouterConfig(model_name=MODEL, tokenizer="bytes", fingerprint=FINGERPRINT),
        calls=ScriptedReplicas(),
        encoder=PromptEncoder(ByteTokenizer(), name="bytes"),
        version="0",
        clock=clock,
    )
    monkeypatch.setattr(made.routing, "_membership_listeners", [])  # no sockets
    subscribers = made.subscribers
    made.subscribers = FakeSubscribers()  # type: ignore[assignment]
    yield made
    made.subscribers = subscribers
    await made.aclose()


def _synced(parts: RouterParts) -> set[str]:
    assert isinstance(parts.subscribers, FakeSubscribers)
    return parts.subscribers.synced


async def test_it_is_ready_when_every_known_cache_is_known(parts: RouterParts) -> None:
    assert parts.readiness().reason == "no replica is known"
    parts.routing.update_replicas(REPLICAS)
    assert "2 of 2" in (parts.readiness().reason or "")
    _synced(parts).add("a")
    assert "1 of 2" in (parts.readiness().reason or "")
    _synced(parts).add("b")
    assert parts.readiness().reason is None


async def test_a_cache_that_never_becomes_known_keeps_it_out_of_service_for_a_while(
    parts: RouterParts, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    parts.routing.update_replicas(REPLICAS)
    _synced(parts).add("a")
    for _ in range(2):
        assert "1 of 2" in (parts.readiness().reason or "")
        clock.now += 0.9 * SNAPSHOT_LIMIT_S / 2
    assert parts.readiness().reason is not None
    clock.now += 0.1 * SNAPSHOT_LIMIT_S
    assert parts.readiness().reason is None
    assert [record.replicas for record in caplog.records] == ["b"]  # type: ignore[attr-defined]
    assert parts.readiness().reason is None
    assert len(caplog.records) == 1


async def test_a_resync_or_a_newcomer_does_not_take_it_out_of_service(parts: RouterParts) -> None:
    parts.routing.update_replicas(REPLICAS)
    _synced(parts).update("ab")
    assert parts.readiness().reason is None
    _synced(parts).clear()
    parts.routing.update_replicas({**REPLICAS, ReplicaId("c"): a_replica_info()})
    assert parts.readiness().reason is None
    parts.routing.update_replicas({})
    assert parts.readiness().reason is not None


@pytest.mark.parametrize(
    "other", [a_replica_info(fingerprint=replace(FINGERPRINT, revision="another")), None]
)
async def test_a_successor_waits_for_a_replica_that_it_can_ask(
    parts: RouterParts, other: ReplicaInfo | None
) -> None:
    """Serve lets its predecessor go as soon as it runs, and would be left with one that refuses everybody.

    Others have another model, or tell of themselves what it cannot read.
    """
    waiting = asyncio.create_task(parts.until_model_is_served())
    await asyncio.sleep(0)
    old = {ReplicaId("old"): other}
    for listed in (old, {**old, ReplicaId("older"): other}):
        parts.routing.update_replicas(listed)
        await asyncio.sleep(0.01)
        assert not waiting.done()
    parts.routing.update_replicas({**old, **REPLICAS})
    await asyncio.wait_for(waiting, 10)


@pytest.mark.parametrize("told", [{}, REPLICAS])
async def test_it_waits_for_nobody_where_no_replica_has_another_model(
    parts: RouterParts, told: dict[ReplicaId, ReplicaInfo]
) -> None:
    waiting = asyncio.create_task(parts.until_model_is_served(first_news_s=600.0))
    await asyncio.sleep(0)
    parts.routing.update_replicas(told)
    await asyncio.wait_for(waiting, 10)


async def test_it_waits_not_for_ever_to_hear_of_replicas(parts: RouterParts) -> None:
    await asyncio.wait_for(parts.until_model_is_served(first_news_s=0.01), 10)


async def test_no_thread_of_its_own_is_left_behind() -> None:
    before = set(threading.enumerate())
    parts = RouterParts(
        RouterConfig(model_name=MODEL, tokenizer="bytes", fingerprint=FINGERPRINT),
        calls=ScriptedReplicas(),
        encoder=PromptEncoder(ByteTokenizer(), name="bytes"),
        version="0",
    )
    completion = parse_completion({"model": MODEL, "prompt": "x", "guided_regex": "a"})
    assert (await parts.service.forms.of_completion(completion)).structure is not None
    started = [thread for thread in threading.enumerate() if thread not in before]
    assert any(thread.name.startswith("warmpath-structures") for thread in started)
    await parts.aclose()
    for thread in started:
        if thread.name.startswith("warmpath-structures"):
            await asyncio.to_thread(thread.join, 10)
            assert not thread.is_alive()


async def test_a_replica_that_left_leaves_no_series(parts: RouterParts) -> None:
    parts.routing.update_replicas(REPLICAS)
    assert b'warmpath_replica_in_flight{replica="b"} 0.0' in generate_latest(parts.metrics.registry)
    parts.routing.update_replicas({ReplicaId("a"): a_replica_info()})
    text = generate_latest(parts.metrics.registry)
    assert b'replica="a"' in text
    assert b'replica="b"' not in text


async def test_every_series_is_there_before_its_first_sample(parts: RouterParts) -> None:
    """A counter that appears with its first error cannot be alerted on."""
    text = generate_latest(parts.metrics.registry).decode()
    for series in (
        'warmpath_requests_total{endpoint="completions",outcome="busy"} 0.0',
        'warmpath_decisions_total{policy="expected_time",reason="prefix"} 0.0',
        'warmpath_retries_total{phase="mid_stream",why="replica_lost"} 0.0',
        'warmpath_event_resyncs_total{reason="gap"} 0.0',
        "warmpath_index_entries 0.0",
    ):
        assert series in text


async def test_metrics_tell_what_became_of_events_and_of_tokenization(parts: RouterParts) -> None:
    text = generate_latest(parts.metrics.registry).decode()
    for line in (
        "warmpath_event_batches_applied_total 0.0",
        "warmpath_event_batches_lost_total 0.0",
        'warmpath_event_snapshots_total{reason="drift"} 0.0',
        'warmpath_event_lag_seconds_bucket{le="+Inf"} 0.0',
        "warmpath_event_lag_seconds_sum 0.0",
        "warmpath_tokenization_by_segment 0.0",  # the tests' tokenizer has none
    ):
        assert line in text.splitlines()


def test_the_segment_caches_numbers_are_metrics() -> None:
    metrics = RouterMetrics([], [])
    metrics.watch_tokenization(lambda: CacheStatistics(4096, 7, 1000, 200, 3), lambda: 5)
    lines = generate_latest(metrics.registry).decode().splitlines()
    for line in (
        "warmpath_tokenization_by_segment 1.0",
        "warmpath_tokenization_pending 5.0",
        "warmpath_tokenization_cache_bytes 4096.0",
        "warmpath_tokenization_cache_segments 7.0",
        "warmpath_tokenization_evictions_total 3.0",
        'warmpath_tokenization_tokens_total{source="kept"} 1000.0',
        'warmpath_tokenization_tokens_total{source="tokenized"} 200.0',
    ):
        assert line in lines
