"""The live page in a real browser: what it shows, light, dark and on a phone, and what it does then.

`WARMPATH_SCREENSHOTS=folder` keeps what was seen, to be looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from cache.events import Load
from cache.messages import ReplicaInfo
from cache.types import ReplicaId, RequestId
from router.openai_api.dashboard import DATA_PATH
from router.placement.decision import RouteQuery
from router.tenants.settings import TenantSettings
from tests.chromium import NOT_FOUND, Browser, Page, find_chromium, running_chromium
from tests.fakes.holding import HoldingReplicas
from tests.fakes.http import BLOCK_SIZE, RouterUnderTest, a_replica_info
from tests.fakes.router import STEP_TIME, chain
from tests.http_server import HttpServer, scripted_server, serving

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NOT_FOUND)

SECRET = "a prompt that nobody else may read"
ROWS = "document.querySelectorAll('#decisions tbody tr:not(.detail)').length"
LIVE = "document.getElementById('status')?.dataset.state === 'live'"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with running_chromium(CHROMIUM) as running:
        yield running


class Bench:
    """A Router behind HTTP, and what is to be done on its event loop."""

    def __init__(self, router: RouterUnderTest, server: HttpServer) -> None:
        self.router = router
        self.url = f"{server.url}/dashboard"
        self._server = server
        self.num_decided = 0

    def do(self, act: Callable[[], Any]) -> Any:
        async def acting() -> Any:
            return act()

        return asyncio.run_coroutine_threadsafe(acting(), self._server.loop).result(10)

    def complete(self, prompt: str) -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 3}
        assert httpx.post(f"{self._server.url}/v1/completions", json=body).status_code == 200

    def decide(self, count: int) -> None:
        """Answered requests that share prefixes in threes, without HTTP."""
        self.do(lambda: [self._decide() for _ in range(count)])

    def _decide(self) -> None:
        routing, self.num_decided = self.router.parts.routing, self.num_decided + 1
        name, kind = RequestId(f"request-{self.num_decided:06}"), self.num_decided % 3
        hashes = chain(name, 8, chain(f"shared-{kind}", 60 * (1 + kind)))
        num_tokens = len(hashes) * BLOCK_SIZE + 2
        query = RouteQuery(name, hashes, num_tokens, token_ids=array("i", range(num_tokens)))
        placement = routing.choose(query)
        routing.first_token(name, placement.replica_id, placement.overlap_blocks * BLOCK_SIZE)
        routing.finish(name, block_hashes=hashes, num_output_tokens=3)

    def load(self, index: int, **changes: Any) -> None:
        fields = {"free_blocks": 600, "total_blocks": 1000, "step_time": STEP_TIME, **changes}
        replica_id = self.router.replicas[index]
        self.do(lambda: self.router.parts.routing.on_load(replica_id, Load(**fields)))

    def members(self, *names: str) -> None:
        infos: dict[ReplicaId, ReplicaInfo] = {ReplicaId(name): a_replica_info() for name in names}
        self.do(lambda: self.router.parts.routing.update_replicas(infos))


@contextlib.contextmanager
def bench(num_replicas: int = 2, **config: Any) -> Iterator[Bench]:
    settings = {"silent_after_s": 3600.0, "dashboard": True, **config}
    router = RouterUnderTest(num_replicas=num_replicas, max_model_len=10_000, **settings)
    with scripted_server(router) as server:
        yield Bench(router, server)


@pytest.fixture(scope="module")
def busy() -> Iterator[Bench]:
    """Two replicas that have answered a few dozen requests."""
    with bench() as made:
        made.load(0, num_running=5, num_waiting=2, queued_uncached_tokens=900)
        made.load(1, num_running=1)
        made.decide(40)
        yield made


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with browser.page() as opened:
        yield opened


def keep(page: Page, name: str) -> None:
    """A screenshot for who wants to look."""
    if folder := os.environ.get("WARMPATH_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(Path(folder) / f"{name}.png")


# Contrast of every text that can be seen, by WCAG 2.2's formula; those below its minimum.
POOR_CONTRAST = """
(() => {
  const pencil = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const rgba = (color) => {
    pencil.clearRect(0, 0, 1, 1); pencil.fillStyle = color; pencil.fillRect(0, 0, 1, 1);
    return [...pencil.getImageData(0, 0, 1, 1).data];
  };
  const over = ([r, g, b, a], under) =>
    [r, g, b].map((c, i) => c * a / 255 + under[i] * (1 - a / 255)).concat(255);
  const behind = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(rgba(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255, 255]);
  };
  const luminance = (color) => color.slice(0, 3).map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const found = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    const text = node.data.trim().slice(0, 40);
    if (!text || !element.checkVisibility() || element.closest('.skip, option, script, style')) continue;
    const style = getComputedStyle(element);
    const ground = behind(element);
    const ink = over(rgba(element instanceof SVGElement ? style.fill : style.color), ground);
    const [light, dark] = [luminance(ink), luminance(ground)].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < (isLarge ? 3 : 4.5)) found.add(`${ratio.toFixed(2)} ${element.className} "${text}"`);
  }
  return [...found];
})()
"""
# What sticks out of the page sideways, or out of its own box without a way to scroll to it.
STICKING_OUT = """
(() => [...document.querySelectorAll('main *, header *')]
  .filter((e) => e.checkVisibility() && !e.closest('.scroll, svg, option, .run, .cards > thead'))
  .filter((e) => e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
  .map((e) => `${e.tagName} ${e.className} ${e.textContent.slice(0, 40)}`))()
"""


def test_a_request_is_shown_by_its_numbers_alone(page: Page) -> None:
    with bench() as made:
        made.complete(SECRET * 2)
        made.complete(SECRET * 2 + " and more of it")
        page.open(made.url)
        page.wait_for(f"{ROWS} === 2")
        text = page.text()
        assert "Warmpath" in text
        assert "nobody holds any of it" not in text  # until it is asked for
        assert page.run("document.querySelectorAll('.run').length") >= 2
        assert page.run("document.querySelectorAll('.replica').length") == 2
        assert "5 min" in text
        assert SECRET not in page.run("document.documentElement.outerHTML")
        assert page.run("document.title").startswith("Warmpath · 2 replicas")
        assert {address.partition("/dashboard")[0] for address in page.requested()} == {
            made.url.removesuffix("/dashboard")
        }
        assert page.complaints() == []


def test_held_prefixes_are_shown_while_there_are_some(browser: Browser) -> None:
    with bench() as made, browser.page(width=390, height=844) as page:
        made.do(lambda: HoldingReplicas(made.router))
        page.open(made.url)
        page.wait_for(LIVE)
        assert page.run("document.getElementById('pins-card').hidden")
        body = {"model": "tiny", "prompt": SECRET * 4, "copies": 2, "seconds": 600}
        api = made.url.replace("/dashboard", "/v1/prefixes")
        held = httpx.post(api, json=body).json()
        page.wait_for(f"document.getElementById('pins').innerText.includes('{held['id']}')")
        text = page.text()
        assert all(said in text for said in ("Held prefixes", "2 of 2", "replica-0", "10 min"))
        assert SECRET not in page.run("document.documentElement.outerHTML")
        assert page.run(STICKING_OUT) == []
        assert page.run(POOR_CONTRAST) == []
        page.run("document.getElementById('pins-card').scrollIntoView()")
        keep(page, "held-prefixes-phone")
        httpx.delete(f"{api}/{held['id']}")
        page.wait_for("document.getElementById('pins-card').hidden")
        assert page.complaints() == []


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [("light", 1440, "light"), ("dark", 1440, "dark"), ("phone", 390, "light"), ("phone-dark", 390, "dark")],
)
def test_it_can_be_read(browser: Browser, busy: Bench, name: str, width: int, scheme: str) -> None:
    with browser.page(width=width, height=844, scheme=scheme) as page:
        page.open(busy.url)
        page.wait_for(f"{ROWS} >= 10")
        page.run("document.querySelector('.row-button').click()")
        page.wait_for("document.querySelector('.detail')")
        keep(page, name)
        assert page.run("document.documentElement.dataset.theme") == scheme
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run(STICKING_OUT) == []
        assert page.run(POOR_CONTRAST) == []
        assert page.complaints() == []


def test_the_theme_can_be_chosen_and_is_kept(page: Page, busy: Bench) -> None:
    page.open(busy.url)
    page.wait_for(LIVE)
    for expected in ("light", "dark"):
        page.run("document.getElementById('theme').click()")
        assert page.run("document.documentElement.dataset.theme") == expected
    page.open(f"{busy.url}?again")
    page.wait_for(LIVE)
    assert page.run("document.documentElement.dataset.theme") == "dark"


def test_nothing_to_show_is_said(page: Page) -> None:
    with bench(num_replicas=0) as made:
        page.open(made.url)
        page.wait_for(LIVE)
        text = page.text()
        for said in (
            "No replica is known",
            "No first token in the last five minutes",
            "Nothing has been computed yet",
            "No prompt of a full block has been routed yet",
            "No decision yet",
        ):
            assert said in text
        assert page.run(POOR_CONTRAST) == []
        keep(page, "empty")
        made.members("first")
        page.wait_for("document.querySelector('.replica .chip')?.textContent === 'joined'")


def test_a_replica_that_joins_or_leaves_is_marked(page: Page) -> None:
    with bench() as made:
        page.open(made.url)
        page.wait_for(LIVE)
        assert page.run("document.querySelectorAll('.replica .chip').length") == 0
        made.members("replica-0", "replica-2")
        page.wait_for("document.querySelectorAll('.replica .chip').length === 2")
        told = "[...document.querySelectorAll('.replica-head')].map((e) => e.innerText.split('\\n').join())"
        chips = page.run(told)
        assert chips == ["replica-0", "replica-1,left", "replica-2,joined"]
        assert page.run("document.querySelector('.tile-value').innerText.trim()") == "2"


def test_trouble_is_told_apart(page: Page) -> None:
    with bench(num_replicas=3, silent_after_s=0.3) as made:
        page.open(made.url)
        page.wait_for("document.querySelectorAll('.replica .chip-bad').length === 3")
        assert "3 silent" in page.text()
        made.load(0, is_draining=True)
        page.wait_for("document.body.innerText.includes('draining')")


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


def test_pausing_stops_the_questions(page: Page, busy: Bench) -> None:
    page.open(busy.url)
    page.wait_for(LIVE)
    page.press("p")
    page.wait_for("document.getElementById('status').dataset.state === 'paused'")
    asked = len(page.requested())
    busy.decide(1)
    page.run("new Promise((done) => setTimeout(done, 1500))")
    assert len(page.requested()) == asked
    page.press("p")
    page.run("new Promise((done) => setTimeout(done, 1500))")
    assert len(page.requested()) > asked
    assert page.run(LIVE)


@pytest.mark.parametrize("width", [1440, 390])
def test_sixty_four_replicas_can_be_read(browser: Browser, width: int) -> None:
    with bench(num_replicas=64) as made, browser.page(width=width, height=900) as page:
        made.router.replicas = [ReplicaId(f"warmpath#Replica#{index:08x}") for index in range(64)]
        made.members(*made.router.replicas)
        for index in range(64):
            made.load(index, num_running=index % 7, num_waiting=index % 3, free_blocks=1000 - 15 * index)
        made.decide(30)
        page.open(made.url)
        page.wait_for(f"{ROWS} >= 10")
        if width < 720:
            assert page.run("document.querySelectorAll('.replica').length") == 16
            page.run("document.getElementById('fleet-more').click()")
        page.wait_for("document.querySelectorAll('.replica').length === 64")
        cells = "[...document.querySelectorAll('.replica-name, .replica dd')]"
        cut = f"{cells}.filter((e) => e.scrollWidth > e.clientWidth + 1)"
        assert page.run(f"{cut}.map((e) => e.textContent)") == []
        assert page.run(STICKING_OUT) == []
        assert page.run("document.querySelector('.replica-name').textContent") == "00000000"
        page.run(
            "document.getElementById('order').value = 'kv';"
            "document.getElementById('order').dispatchEvent(new Event('change'))"
        )
        assert page.run("document.querySelector('.replica-name').textContent") == "0000003f"
        keep(page, f"sixty-four-{width}")


def test_everything_can_be_done_from_the_keyboard(page: Page, busy: Bench) -> None:
    page.open(busy.url)
    page.wait_for(f"{ROWS} >= 10")
    reached = []
    for _ in range(60):
        page.press("Tab")
        reached.append(page.run("document.activeElement.id || document.activeElement.className"))
        if reached[-1] == "row-button":
            break
    for wanted in ("skip", "span-0", "span-1", "pause", "theme", "ttft", "run", "order", "row-button"):
        assert wanted in reached
    assert reached.count("run") == 1  # arrows go on from there

    page.press("Enter")
    page.wait_for("document.querySelector('.row-button[aria-expanded=true]')")
    story = page.run("document.querySelector('.detail').innerText")
    assert "expected_time sent" in story
    busy.decide(30)  # newer ones push it out of the list, but it stays as long as it is open
    newest = f"request-{busy.num_decided:06}"
    page.wait_for(f"document.querySelector('#decisions tr .mono').innerText === '{newest}'")
    assert page.run("document.querySelector('.detail').innerText") == story
    assert page.run("document.activeElement.className") == "row-button"

    page.run("document.querySelector('.run[tabindex=\"0\"]').focus()")
    first = page.run("document.activeElement.textContent")
    page.press("ArrowDown")
    assert page.run("document.activeElement.className") == "run"
    page.press("ArrowUp")
    page.press("ArrowRight")
    assert page.run("document.activeElement.textContent") != first
    assert "of prompts" in page.run("document.getElementById('chain-read').innerText")
    page.press("Enter")
    page.wait_for("!document.getElementById('crumbs').hidden")
    page.press("Escape")
    page.wait_for("document.getElementById('crumbs').hidden")

    page.run("document.getElementById('ttft').focus()")
    page.press("ArrowLeft")
    assert "now:" in page.run("document.getElementById('ttft-read').innerText")
    assert "now:" in page.run("document.getElementById('aloud').textContent")


def test_nothing_moves_for_who_asked_for_that(page: Page, busy: Bench) -> None:
    moving = """
      document.getAnimations().filter((a) => a.playState === 'running').length +
      [...document.querySelectorAll('.run')].map((e) => getComputedStyle(e))
        .filter((s) => s.transitionDuration !== '0s').length
    """
    page.open(busy.url)
    page.wait_for(f"{ROWS} >= 10")
    page.wait_for(f"{moving} > 0")
    page.prefer("light", reduced_motion=True)
    page.wait_for(f"{moving} === 0")


def test_a_token_is_asked_for_kept_in_this_tab_and_forgotten(page: Page) -> None:
    token = "a token of many letters"
    with bench(debug_token=token) as made:
        page.open(made.url)
        page.wait_for("!document.getElementById('login').hidden")
        assert "for operators" in page.text()
        assert page.run(POOR_CONTRAST) == []
        keep(page, "login")
        page.wait_for("document.activeElement.id === 'key'")
        page.type("a wrong one")
        page.press("Enter")
        page.wait_for("document.getElementById('login-error').innerText.includes('not known')")
        page.type(token)
        page.press("Enter")
        page.wait_for(LIVE)
        assert page.run("document.querySelectorAll('.replica').length") == 2
        assert page.run("JSON.stringify(sessionStorage)").count(token) == 1
        assert token not in page.run("JSON.stringify(localStorage) + document.cookie + location.href")
        page.call("Page.reload")
        page.wait_for(LIVE)
        page.run("document.getElementById('forget').click()")
        page.wait_for("document.getElementById('login')?.hidden === false")
        assert page.run("sessionStorage.length") == 0
        assert page.run("document.querySelectorAll('#decisions *, .replica').length") == 0


def test_where_there_are_api_keys_the_browser_gives_an_operators(browser: Browser, tmp_path: Path) -> None:
    """It asks for one itself before it shows the page, and sends it with the page's questions."""
    lines = []
    for name, is_operator in (("guest", False), ("oncall", True)):
        digest = hashlib.sha256(f"wp-{name}-{'k' * 32}".encode()).hexdigest()
        lines.append(f"  - {{name: {name}, sha256: {digest}, operator: {str(is_operator).lower()}}}\n")
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n" + "".join(lines))
    settings = TenantSettings(keys_file=str(keys), cache_scope="shared")
    with bench(tenants=settings) as made:
        address = made.url.removeprefix("http://")
        for name, seen in (("guest", "document.body.innerText.includes('error')"), ("oncall", LIVE)):
            with browser.page() as page:
                page.open(f"http://anybody:wp-{name}-{'k' * 32}@{address}")
                page.wait_for(seen)
                num_replicas = page.run("document.querySelectorAll('.replica').length")
                assert num_replicas == (2 if name == "oncall" else 0)


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
