"""A Router's own series: each is documented, parts of decisions are timed, nothing stays of who left."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from cache.messages import Delta, FinishReason, GenerateRequest
from cache.types import ReplicaId
from router.bodies.body_channel import BodyStatistics
from router.bodies.body_metrics import BodyCollector
from router.config import RecordConfig
from router.deltas.delta_channels import ChannelStatistics
from router.deltas.delta_metrics import DeltaCollector
from router.errors import ReplicaLost
from router.fleet.exposition import text
from router.fleet.report import families_of
from router.metrics import DecisionPart, RouterMetrics
from router.prompts.segment_cache import CacheStatistics
from router.tenants.gate import GateStatistics
from router.tenants.tenancy import GateCollector
from tests.fakes.http import RouterUnderTest, a_replica_info, counting
from tests.fakes.router import load
from tests.fakes.routers import parsed, value

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


@pytest.fixture
async def router() -> AsyncGenerator[RouterUnderTest, None]:
    async with RouterUnderTest() as router:
        yield router


async def test_every_series_is_in_the_document_and_the_other_way_round(tmp_path: Path) -> None:
    record = RecordConfig(str(tmp_path))
    async with RouterUnderTest(shadow_policy="round_robin", record=record) as router:
        told = names((await router.client.get("/metrics")).text)
    # What only some deployments have.
    more = RouterMetrics([], [])
    more.watch_tokenization(lambda: CacheStatistics(0, 0, 0, 0, 0), lambda: 0)
    more.registry.register(DeltaCollector(lambda: ChannelStatistics({ReplicaId("r"): True}, 0, 0, 0)))
    more.registry.register(BodyCollector(BodyStatistics))
    more.registry.register(GateCollector(lambda: GateStatistics(0, 0, 0, Counter(), False)))
    told |= names(text(families_of(more.registry.collect())).decode())
    rows = re.findall(r"^\| `(\S+?)(?:\{.*?\})?` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert told == set(rows)


def names(exposition: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+)", exposition, re.MULTILINE))


async def test_every_label_is_in_the_document(router: RouterUnderTest) -> None:
    await router.chat()
    rows = re.findall(r"^\| `(\S+?)(?:\{(.*?)\})?` \|", DOCUMENT.read_text(), re.MULTILINE)
    common = {"router", "le", "model_name", "engine"}
    documented = {name: {label for label in labels.split(", ") if label} for name, labels in rows}
    for name, labels in parsed((await router.client.get("/metrics")).content):
        family = name if name in documented else name.rsplit("_", 1)[0]
        assert {label for label, _ in labels} - common == documented[family], name


async def test_each_part_of_a_decision_is_timed(router: RouterUnderTest) -> None:
    await router.chat()
    await router.complete([1, 2, 3])
    counts = {
        part: router.metric("warmpath_decision_seconds_count", part=part.value) for part in DecisionPart
    }
    assert counts.pop(DecisionPart.TOKENIZE) == 1  # ids are ids already
    assert counts.pop(DecisionPart.HASH) == counts.pop(DecisionPart.BOOK) == 2
    assert counts[DecisionPart.MATCH] == counts[DecisionPart.RANK] >= 2


async def test_structures_are_counted_by_kind_and_tried_once(router: RouterUnderTest) -> None:
    await router.chat()
    for _ in range(2):
        await router.chat(guided_regex="a+")
    await router.chat(guided_json={"type": "integer"})
    await router.complete("x", guided_choice=["a"])
    await router.chat(guided_json={"not": {}})
    kinds = {
        kind: router.metric("warmpath_structured_requests_total", kind=kind)
        for kind in ("regex", "json_schema", "grammar", "calls")
    }
    assert kinds == {"regex": 2, "json_schema": 1, "grammar": 1, "calls": 0}
    verdicts = [
        router.metric("warmpath_structures_checked_total", verdict=verdict)
        for verdict in ("followed", "refused")
    ]
    assert verdicts == [3, 1]
    assert router.metric("warmpath_structure_check_seconds_count") == 4
    assert router.metric("warmpath_structures_pending") == 0


async def test_hashes_that_were_kept_are_told_from_those_computed(router: RouterUnderTest) -> None:
    for _ in range(3):
        await router.complete(list(range(40)))
    assert router.metric("warmpath_hashed_blocks_total", source="computed") == 10
    assert router.metric("warmpath_hashed_blocks_total", source="kept") == 20
    assert router.metric("warmpath_hash_cache_runs") == 1


async def test_a_continuation_is_counted_with_what_it_cost(router: RouterUnderTest) -> None:
    """40 prompt tokens and 4 generated ones are sent on; 32 are found there."""

    async def dies(request: GenerateRequest, replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        deltas = counting(request, replica)
        yield await anext(deltas)
        yield await anext(deltas)
        raise ReplicaLost("killed")

    async def goes_on(request: GenerateRequest, replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        async for delta in counting(request, replica):
            yield Delta(delta.text, delta.token_ids, 32, delta.finish_reason)

    first, second = router.replicas
    router.calls.scripts[first] = lambda request, name: (goes_on if request.attempt else dies)(request, name)
    router.calls.scripts[second] = router.calls.scripts[first]
    await router.complete(list(range(40)), max_tokens=10)
    assert router.metric("warmpath_continuations_total") == 1
    assert router.metric("warmpath_continued_tokens_total", source="cached") == 32
    assert router.metric("warmpath_continued_tokens_total", source="computed") == 12


@pytest.mark.parametrize(("told", "cached"), [(45, 44), (-1, 0)])
async def test_a_continuation_goes_on_whatever_its_replica_says_of_its_cache(
    router: RouterUnderTest, caplog: pytest.LogCaptureFixture, told: int, cached: int
) -> None:
    """A counter that was to fall ended the answer in a 500."""

    async def dies_once(request: GenerateRequest, replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        num_left = 2
        async for delta in counting(request, replica):
            yield Delta(delta.text, delta.token_ids, told if request.attempt else 0, delta.finish_reason)
            num_left -= 1
            if not request.attempt and not num_left:
                raise ReplicaLost("killed")

    router.follow(dies_once)
    answer = await router.complete(list(range(40)), max_tokens=10)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 10)
    assert router.metric("warmpath_continued_tokens_total", source="cached") == cached
    assert router.metric("warmpath_continued_tokens_total", source="computed") == 44 - cached
    [said] = [record for record in caplog.records if record.msg == "wrong cached tokens"]
    assert (vars(said)["cached_tokens"], vars(said)["sent_tokens"]) == (told, 44)
    assert vars(said)["replica_id"] in router.replicas


async def test_answers_that_are_over_are_not_continued(router: RouterUnderTest) -> None:
    """Of two one has ended: the other is continued from 40 prompt tokens and 2 of its own."""

    async def dies_once(request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        if not request.attempt:
            yield Delta("all of it", tuple(range(10)), 0, FinishReason.LENGTH, choice=0)
            yield Delta("a part", (1, 2), 0, None, choice=1)
            raise ReplicaLost("killed")
        yield Delta(" and the rest", tuple(range(8)), 36, FinishReason.LENGTH, choice=1)

    router.follow(dies_once)
    assert (await router.complete(list(range(40)), max_tokens=10, n=2)).status_code == 200
    assert router.metric("warmpath_continued_tokens_total", source="cached") == 36
    assert router.metric("warmpath_continued_tokens_total", source="computed") == 6


async def test_a_thousand_replicas_that_came_and_went_leave_no_series(router: RouterUnderTest) -> None:
    routing = router.parts.routing
    stays = next(iter(routing.replicas))
    before = await lines(router)
    for number in range(1000):
        routing.update_replicas({stays: a_replica_info(), ReplicaId(f"gone-{number}"): a_replica_info()})
        if number % 250 == 0:
            assert f"gone-{number}" in (await router.client.get("/metrics")).text
    routing.update_replicas({stays: a_replica_info()})
    after = await lines(router)
    assert after <= before
    assert not [line for line in after if "gone" in line]


async def lines(router: RouterUnderTest) -> set[str]:
    """Series by name and labels, however often a snapshot was wanted."""
    text = (await router.client.get("/metrics")).text
    return {line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")}


async def test_refusals_are_counted_by_why(router: RouterUnderTest) -> None:
    """Also while there is nobody whose limit a request could be held against."""
    router.parts.routing.update_replicas({})
    assert (await router.complete([1, 2, 3])).status_code == 503
    assert (await router.chat()).status_code == 503
    values = parsed((await router.client.get("/metrics")).content)
    name = router.parts.fleet.router
    assert value(values, "warmpath_rejections_total", reason="all_busy", router=name) == 0
    assert value(values, "warmpath_rejections_total", reason="no_replica", router=name) == 2


@pytest.mark.parametrize("binding", ["late", "at_once"])
async def test_the_queue_is_told_in_seconds_beside_its_limit(binding: str) -> None:
    async with RouterUnderTest(binding=binding, max_wait_s=7.0) as router:
        name = router.parts.fleet.router

        async def told(of: str) -> float:
            values = parsed((await router.client.get("/metrics")).content)
            return value(values, f"warmpath_{of}", router=name)

        assert await told("queue_wait_limit_seconds") == 7.0
        assert await told("queue_wait_seconds") == 0.0
        for replica_id in router.replicas:
            router.parts.routing.on_load(replica_id, load(queued_uncached_tokens=50_000, num_waiting=9))
        before_s = router.parts.routing.wait_s()
        assert before_s > 1.0
        told_s = await told("queue_wait_seconds")
        # It runs out by the clock, and a busy machine takes its time over a scrape.
        assert router.parts.routing.wait_s() <= told_s <= before_s
        assert await told("overload") == 0.0
