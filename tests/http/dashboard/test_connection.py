"""What the page does about the Router it asks: lost, late, of another version, or one of several."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.types import ASGIApp, Receive, Scope, Send

from router.openai_api.dashboard import DATA_PATH
from tests.chromium import Page
from tests.fakes.http import RouterUnderTest
from tests.http.dashboard.bench import Bench
from tests.http.dashboard.looking import LIVE, ROWS, keep, needs_chromium
from tests.http_server import serving

pytestmark = needs_chromium


def test_a_lost_connection_leaves_what_was_there_and_ends_by_itself(page: Page, busy: Bench) -> None:
    page.open(busy.url)
    page.wait_for(f"{ROWS} >= 10")
    page.go_offline(True)
    page.wait_for("!document.getElementById('banner').hidden")
    assert "Connection lost" in page.text()
    assert page.run(ROWS) >= 10
    page.wait_for("document.title.startsWith('(no connection)')")
    keep(page, "lost")
    page.go_offline(False)
    page.wait_for(f"document.getElementById('banner').hidden && {LIVE}")


def test_a_router_that_is_not_there_yet_is_waited_for(page: Page, busy: Bench) -> None:
    """The data answers with an error first: no banner is left once it does not."""
    page.open(busy.url)
    page.wait_for(LIVE)
    page.run("window.real = fetch; window.fetch = async () => new Response('', { status: 503 }); 0")
    page.wait_for("!document.getElementById('banner').hidden")
    page.run("window.fetch = window.real; document.getElementById('retry').click()")
    page.wait_for(f"document.getElementById('banner').hidden && {LIVE}")


def test_a_page_of_another_version_says_so_and_stops(page: Page, busy: Bench) -> None:
    page.open(busy.url)
    page.wait_for(LIVE)
    page.run("window.fetch = async () => Response.json({ version: 2 }); 0")
    page.wait_for("document.getElementById('banner-text').innerText.includes('another version')")
    page.run("new Promise((done) => setTimeout(done, 1200))")
    assert (
        page.run("!document.getElementById('banner').hidden && document.getElementById('retry').innerText")
        == "Reload"
    )


def test_of_several_routers_one_is_shown_by_name(page: Page) -> None:
    """A proxy spreads the page's questions over both: what is shown is one Router's all the same."""
    routers = [RouterUnderTest(num_replicas=number, dashboard=True) for number in (1, 3)]

    asked = 0
    answering = list(routers)

    @contextlib.asynccontextmanager
    async def make_app() -> AsyncIterator[ASGIApp]:
        async def in_turn(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal asked
            asked += scope["path"] == DATA_PATH
            await answering[asked % len(answering)].api(scope, receive, send)

        async with routers[0], routers[1]:
            yield in_turn

    with serving(make_app) as server:
        page.open(f"{server.url}/dashboard")
        page.wait_for("document.querySelectorAll('#router option').length === 2")
        shown = page.run("document.getElementById('router').value")
        names = {router.parts.insight.name: len(router.replicas) for router in routers}
        tile = "document.querySelector('.tile-value').innerText.trim()"
        for _ in range(3):
            assert page.run(tile) == str(names[shown])
            page.run("new Promise((done) => setTimeout(done, 700))")
        [other] = names.keys() - {shown}
        page.run(
            f"document.getElementById('router').value = '{other}';"
            "document.getElementById('router').dispatchEvent(new Event('change'))"
        )
        assert page.run(tile) == str(names[other])
        page.run("new Promise((done) => setTimeout(done, 1500))")
        assert page.run(tile) == str(names[other])
        assert f"Router {other}" in page.text()

        answering[:] = [router for router in routers if router.parts.insight.name == shown]
        page.run(
            "window.before = performance.now.bind(performance); 0"
        )  # as if ten seconds went by without it
        page.run("performance.now = () => before() + 11000; 0")
        page.wait_for(f"{tile} === '{names[shown]}'")
        assert f"Router {shown}" in page.text()
