"""That the page can be read: light and dark, on a phone, with many replicas, by who wants nothing to move."""

from __future__ import annotations

import pytest

from cache.types import ReplicaId
from tests.chromium import Browser, Page
from tests.http.dashboard.bench import Bench, bench
from tests.http.dashboard.looking import LIVE, POOR_CONTRAST, ROWS, STICKING_OUT, keep, needs_chromium

pytestmark = needs_chromium


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
