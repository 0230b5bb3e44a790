"""What an engine counted reaches the routers on its events' socket, and spoils nothing there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from cache.block_hash import BlockHasher
from cache.engine_report import EngineReport
from cache.event_log import EventLog
from cache.event_wire import encode
from cache.events import FORMAT_VERSION, Load, LoadUpdate
from cache.messages import ReplicaInfo
from cache.types import ReplicaId
from replica.config import SimConfig
from replica.engine.engine import Engine
from replica.engine.engine_core import EngineCore
from replica.publisher import LOAD_TOPIC, REPORT_TOPIC, Publisher
from replica.runners.sim_runner import SimRunner
from router.events.subscriber import SubscriberGroup
from router.placement.routing import Routing
from tests.fakes.engine import fingerprint, make_request, sim_config
from tests.fakes.publisher import a_publisher
from tests.fakes.reports import an_engine_report
from tests.fakes.router import config, info, replica_id

A, B = replica_id(0), replica_id(1)
FAST = SimConfig(base_s=0.0, per_token_s=0.0, per_attention_s=0.0, per_sequence_s=0.0)


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    publisher = a_publisher(port=0, epoch=5)
    publisher.start()
    yield publisher
    publisher.close()


@pytest.fixture
async def group() -> AsyncIterator[SubscriberGroup]:
    async with SubscriberGroup(Routing(config())) as group:
        yield group


def info_of(publisher: Publisher) -> ReplicaInfo:
    return info(event_endpoint=publisher.event_endpoint, snapshot_endpoint=publisher.snapshot_endpoint)


async def the_report(
    group: SubscriberGroup,
    replica: ReplicaId,
    fits: Callable[[EngineReport], bool],
    act: Callable[[], None] = lambda: None,
) -> EngineReport:
    """The first report that fits. The test's own time limit ends the waiting."""
    while True:
        act()
        report = group.statistics().reports.get(replica)
        if report is not None and fits(report):
            return report
        await asyncio.sleep(0.01)


async def test_a_router_hears_what_the_engine_did(publisher: Publisher, group: SubscriberGroup) -> None:
    events, settings = EventLog(epoch=5), sim_config(sim=FAST, heartbeat_interval_s=0.05)
    runner = SimRunner(settings.sim, block_size=settings.block_size)
    engine = Engine(
        EngineCore(runner, settings, BlockHasher(fingerprint()), sink=events),
        settings,
        events=events,
        publish=publisher.publish,
        report=publisher.report,
    )
    group.update({A: info_of(publisher)})
    async with engine:
        async with contextlib.aclosing(engine.generate(make_request("r", range(9), max_tokens=6))) as deltas:
            async for _ in deltas:
                pass
        # An idle engine reports too: what it did last is not forgotten until the next request.
        report = await the_report(group, A, lambda report: report.length_limited == 1)
        assert (report.epoch, report.prompt_tokens, report.generated_tokens) == (5, 9, 6)
        assert report.num_running == 0
        later = await the_report(group, A, lambda later: later.number > report.number)
        assert later.generated_tokens == 6


async def test_reports_arrive_in_order_or_not_at_all(publisher: Publisher, group: SubscriberGroup) -> None:
    group.update({A: info_of(publisher)})
    await the_report(group, A, bool, lambda: publisher.report(an_engine_report(number=5)))
    for number in (4, 5, 6):
        publisher.report(an_engine_report(number=number, generated_tokens=number))
    assert (await the_report(group, A, lambda report: report.number != 5)).generated_tokens == 6
    publisher.report(an_engine_report(epoch=2, number=1))  # another life of the engine counts anew
    assert (await the_report(group, A, lambda report: report.epoch == 2)).number == 1


async def test_a_report_nobody_can_read_changes_nothing(
    publisher: Publisher, group: SubscriberGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no batch: nothing of the cache is missing, and no snapshot is asked for."""
    group.update({A: info_of(publisher)})
    await the_report(group, A, bool, lambda: publisher.report(an_engine_report(number=1)))
    await the_report(group, A, lambda _: group.is_synced(A))
    publisher.report(an_engine_report(number=2))  # behind the last of those: none comes between
    await the_report(group, A, lambda report: report.number == 2)
    for wire in (b"", b"\xc1", b"x" * (1 << 20)):
        publisher._pub.send_multipart([REPORT_TOPIC, wire])
    publisher._pub.send_multipart([REPORT_TOPIC])
    publisher.report(an_engine_report(number=3))
    await the_report(group, A, lambda report: report.number == 3)
    assert group.is_synced(A)
    assert group.statistics().counters.lost == 0
    assert caplog.text.count("malformed report") == 1


async def test_reports_of_another_version_are_complained_of_once_though_its_batches_are_read(
    publisher: Publisher, group: SubscriberGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """Each good batch, and there are many, began a new complaint. A good report does."""
    group.update({A: info_of(publisher)})
    await the_report(group, A, bool, lambda: publisher.report(an_engine_report(number=1)))
    publisher.report(an_engine_report(number=2))  # behind the last of those: none comes between
    await the_report(group, A, lambda report: report.number == 2)
    for number in (3, 4):
        for _ in range(3):
            publisher._pub.send_multipart([REPORT_TOPIC, b"\xc1"])
            load = LoadUpdate(FORMAT_VERSION, 5, 0, 1, Load())
            publisher._pub.send_multipart([LOAD_TOPIC, encode(load)])
        publisher.report(an_engine_report(number=number))
        await the_report(group, A, lambda report, number=number: report.number == number)
        assert caplog.text.count("malformed report") == number - 2


async def test_who_left_reports_no_more(publisher: Publisher, group: SubscriberGroup) -> None:
    group.update({A: info_of(publisher), B: info_of(publisher)})
    for replica in (A, B):
        await the_report(group, replica, bool, lambda: publisher.report(an_engine_report()))
    group.update({B: info_of(publisher)})
    assert set(group.statistics().reports) == {B}
