"""`GET /dashboard` and its data through ASGI: what is told, how much, to whom, and what is not."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest

from cache.events import Load
from cache.types import ReplicaId, RequestId
from router.dashboard.page import load_page
from router.dashboard.view import MAX_DECISIONS, MAX_RUNS, DashboardView
from router.errors import NoReplica
from router.insight.insight import DASHBOARD_CANDIDATES
from router.placement.decision import RouteQuery
from router.tenants.settings import TenantSettings
from tests.fakes.holding import HoldingReplicas
from tests.fakes.http import BLOCK_SIZE, MODEL, RouterUnderTest, a_replica_info
from tests.fakes.router import STEP_TIME, chain

TOKEN = "a token of many letters"
SECRET = "a secret prompt"


@pytest.fixture
async def router() -> AsyncIterator[RouterUnderTest]:
    async with RouterUnderTest(dashboard=True) as under_test:
        yield under_test


async def ask(router: RouterUnderTest, /, **query: str | int) -> DashboardView:
    answer = await router.client.get("/dashboard/data", params=query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return msgspec.json.decode(answer.content, type=DashboardView, strict=True)


def decide(router: RouterUnderTest, name: str, num_blocks: int, parent: str = "") -> None:
    """A request that is routed and answered, without HTTP."""
    routing = router.parts.routing
    hashes = chain(name, num_blocks, chain(parent, num_blocks) if parent else ())
    num_tokens = len(hashes) * BLOCK_SIZE + 1
    query = RouteQuery(RequestId(name), hashes, num_tokens, token_ids=array("i", range(num_tokens)))
    placement = routing.choose(query)
    routing.first_token(RequestId(name), placement.replica_id, 0)
    routing.finish(RequestId(name), block_hashes=hashes, answers=(3,))


async def test_it_is_off_by_default_and_then_nothing_watches() -> None:
    async with RouterUnderTest() as router:
        for path in ("/dashboard", "/dashboard/data"):
            answer = await router.client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
        assert router.parts.insight.live is None


async def test_held_prefixes_are_told_by_name_and_size(router: RouterUnderTest) -> None:
    replicas = HoldingReplicas(router)
    body = {"model": MODEL, "prompt": SECRET, "copies": 2, "seconds": 60}
    held = (await router.client.post("/v1/prefixes", json=body)).json()
    (row,) = (view := await ask(router)).pins
    assert (row.name, row.tokens, row.copies, view.num_pins) == (held["id"], held["tokens"], 2, 1)
    assert sorted(row.replicas) == held["replicas"]
    assert 0 < row.left_s <= 60
    assert SECRET.encode() not in msgspec.json.encode(view)
    replicas.pins.clear()
    await router.client.delete(f"/v1/prefixes/{held['id']}")
    assert (await ask(router)).pins == []


async def test_the_page_comes_with_its_policy_and_is_not_sent_twice(router: RouterUnderTest) -> None:
    page = await router.client.get("/dashboard")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'sha256-")
    assert page.headers["x-content-type-options"] == "nosniff"
    again = await router.client.get("/dashboard", headers={"if-none-match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_an_idle_router_says_so(router: RouterUnderTest) -> None:
    view = await ask(router)
    assert [replica.id for replica in view.fleet.replicas] == ["replica-0", "replica-1"]
    assert (view.model, view.policy, view.block_size) == ("tiny", "expected_time", BLOCK_SIZE)
    assert view.chains == view.decisions == []
    assert view.traffic.sums.requests == view.fleet.held == view.fleet.in_flight == 0
    assert view.traffic.sums.p50_s is None
    assert len(view.traffic.requests) == len(view.traffic.p50_s) >= 1  # one for each 2 s since its start
    assert not any(view.traffic.requests)
    assert not any(view.traffic.p50_s)


async def test_one_request_is_everywhere_and_its_prompt_nowhere(router: RouterUnderTest) -> None:
    assert (await router.complete(SECRET * 4, user=SECRET)).status_code == 200
    answer = await router.client.get("/dashboard/data")
    assert SECRET not in answer.text
    view = await ask(router)
    [row] = view.decisions
    assert row.number == 1
    assert row.request.outcome is not None
    assert row.request.first_token_s is not None
    assert row.request.prompt_tokens == view.traffic.sums.prompt == 4 * len(SECRET)
    sums = view.traffic.sums
    assert sum(sums.uncached.values()) == sums.prompt - sums.delivered
    assert sum(view.traffic.requests) == sums.requests == 1
    [run] = view.chains
    assert (run.parent, run.start, run.share) == (None, 0, 1.0)
    assert run.end == 4 * len(SECRET) // BLOCK_SIZE * BLOCK_SIZE


async def test_names_of_prefixes_cannot_be_looked_up(router: RouterUnderTest) -> None:
    """Neither a block hash nor a digest of one that anybody could work out from a guessed prompt."""
    decide(router, "r", 6)
    answer = await router.client.get("/dashboard/data")
    for block_hash in chain("r", 6):
        for known in (block_hash, block_hash[:8], block_hash[:8][::-1]):
            assert known.hex()[:10] not in answer.text
            assert hashlib.blake2b(known, digest_size=5).hexdigest() not in answer.text
            assert hashlib.sha256(known).hexdigest()[:10] not in answer.text
    async with RouterUnderTest(dashboard=True) as other:
        decide(other, "r", 6)
        [ours], [theirs] = (await ask(router)).chains, (await ask(other)).chains
        assert ours.name != theirs.name


async def test_decisions_are_told_once_and_again_when_more_is_known(router: RouterUnderTest) -> None:
    decide(router, "first", 4)
    first = await ask(router)
    assert [row.request.request_id for row in first.decisions] == ["first"]
    again = await ask(router, router=first.router, cursor=first.cursor)
    assert again.decisions == []
    decide(router, "second", 4)
    then = await ask(router, router=first.router, cursor=first.cursor)
    assert [row.request.request_id for row in then.decisions] == ["second"]


async def test_what_came_of_a_request_is_told_though_others_came_after_it(router: RouterUnderTest) -> None:
    routing = router.parts.routing
    slow = routing.choose(RouteQuery(RequestId("slow"), chain("slow", 4), 4 * BLOCK_SIZE + 1))
    for number in range(MAX_DECISIONS + 8):
        decide(router, f"r{number}", 4)
    before = await ask(router)
    assert "slow" not in {row.request.request_id for row in before.decisions}
    routing.first_token(RequestId("slow"), slow.replica_id, 0)
    [row] = (await ask(router, router=before.router, cursor=before.cursor)).decisions
    assert row.request.request_id == "slow"
    assert row.request.first_token_s is not None


async def test_a_burst_is_told_to_its_end(router: RouterUnderTest) -> None:
    """Whoever follows knows in the end of each of the latest requests what came of it."""
    first = await ask(router)
    for number in range(10):
        await router.complete(f"r{number}")
    known = {row.number: row for row in (await ask(router)).decisions}
    cursor = (await ask(router)).cursor
    for request_id in (slow := [RequestId(f"slow{number}") for number in range(10)]):
        router.parts.routing.choose(RouteQuery(request_id, (), 5))
    for _ in range(2):
        view = await ask(router, router=first.router, cursor=cursor)
        known, cursor = known | {row.number: row for row in view.decisions}, view.cursor
    for request_id in slow:
        router.parts.routing.finish(request_id)
    for number in range(MAX_DECISIONS):
        await router.complete(f"r{number} again")
    for _ in range(3):
        view = await ask(router, router=first.router, cursor=cursor)
        assert len(view.decisions) <= MAX_DECISIONS
        known, cursor = known | {row.number: row for row in view.decisions}, view.cursor
    assert len(known) == 10 + 10 + MAX_DECISIONS
    assert all(row.request.total_s is not None for row in known.values())


def test_the_page_asks_again_when_an_answer_is_full() -> None:
    assert f"const FULL = {MAX_DECISIONS};" in load_page().content.decode()


async def test_another_routers_cursor_hides_nothing(router: RouterUnderTest) -> None:
    decide(router, "r", 4)
    cursor = (await ask(router)).cursor
    assert len((await ask(router, router="somebody", cursor=cursor)).decisions) == 1
    assert len((await ask(router, cursor=cursor)).decisions) == 1


async def test_an_answer_is_bounded_whatever_the_traffic() -> None:
    async with RouterUnderTest(num_replicas=64, dashboard=True) as router:
        routing = router.parts.routing
        for replica_id in router.replicas:
            routing.on_load(replica_id, Load(free_blocks=10, total_blocks=1000, step_time=STEP_TIME))
        for number in range(300):
            decide(router, f"r{number}", 8, parent=f"p{number % 40}")
        answer = await router.client.get("/dashboard/data")
        view = await ask(router)
        assert len(view.fleet.replicas) == 64
        assert len(view.decisions) == MAX_DECISIONS
        assert all(len(row.request.candidates) == DASHBOARD_CANDIDATES for row in view.decisions)
        assert len(view.chains) <= MAX_RUNS
        assert len(answer.content) < 100_000
        assert view.fleet.replicas[0].used == pytest.approx(0.99)


async def test_replicas_join_and_leave(router: RouterUnderTest) -> None:
    router.parts.routing.update_replicas({ReplicaId("new"): a_replica_info()})
    assert [replica.id for replica in (await ask(router)).fleet.replicas] == ["new"]
    router.parts.routing.update_replicas({})
    assert (await ask(router)).fleet.replicas == []


async def test_what_is_refused_is_counted(router: RouterUnderTest) -> None:
    router.parts.routing.update_replicas({})
    with pytest.raises(NoReplica):
        decide(router, "r", 4)
    fleet = (await ask(router)).fleet
    assert (fleet.refused_no_replica, fleet.refused_busy) == (1, 0)


@pytest.mark.parametrize(
    "query", ["span=2", "span=-1", "span=x", "cursor=-1", "cursor=x", "cursor=" + "9" * 40]
)
async def test_a_wrong_question_is_named(router: RouterUnderTest, query: str) -> None:
    answer = await router.client.get(f"/dashboard/data?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_an_hour_is_told_in_coarser_steps(router: RouterUnderTest) -> None:
    decide(router, "r", 4)
    hour, minutes = (await ask(router, span=1)).traffic, (await ask(router, span=0)).traffic
    assert hour.step_s * hour.num_steps == 3600
    assert minutes.step_s * minutes.num_steps == 300
    assert hour.sums == minutes.sums


async def test_the_page_is_open_and_its_data_asks_for_the_token() -> None:
    async with RouterUnderTest(dashboard=True, debug_token=TOKEN) as router:
        assert (await router.client.get("/dashboard")).status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}):
            answer = await router.client.get("/dashboard/data", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
        answer = await router.client.get("/dashboard/data", headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 200


async def test_with_api_keys_it_is_for_operators(tmp_path: Path) -> None:
    def entry(name: str, is_operator: bool) -> str:
        digest = hashlib.sha256(f"wp-{name}-{'k' * 32}".encode()).hexdigest()
        return f"  - {{name: {name}, sha256: {digest}, operator: {str(is_operator).lower()}}}\n"

    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n" + entry("guest", False) + entry("oncall", True))
    settings = TenantSettings(keys_file=str(keys), cache_scope="shared")
    async with RouterUnderTest(dashboard=True, tenants=settings) as router:

        async def status(path: str, key: str | None, *, is_basic: bool = False) -> int:
            secret = f"wp-{key}-{'k' * 32}"
            login = httpx.BasicAuth("anybody", secret) if is_basic else None
            headers = {"authorization": f"Bearer {secret}"} if key and not is_basic else {}
            answer: httpx.Response = await router.client.get(path, headers=headers, auth=login)
            return answer.status_code

        for path in ("/dashboard", "/dashboard/data"):
            bearers = [await status(path, key) for key in (None, "nobody", "guest", "oncall")]
            assert bearers == [401, 401, 403, 200]
            browsers = [await status(path, key, is_basic=True) for key in ("nobody", "guest", "oncall")]
            assert browsers == [401, 403, 200]
