"""What the page shows of a Router and its replicas, and of what changes."""

from __future__ import annotations

import httpx

from tests.chromium import Browser, Page
from tests.fakes.holding import HoldingReplicas
from tests.http.dashboard.bench import bench
from tests.http.dashboard.looking import LIVE, POOR_CONTRAST, ROWS, STICKING_OUT, keep, needs_chromium

pytestmark = needs_chromium

SECRET = "a prompt that nobody else may read"


def test_a_request_is_shown_by_its_numbers_alone(page: Page) -> None:
    with bench() as made:
        made.complete(SECRET * 2)
        made.complete(SECRET * 2 + " and more of it")
        page.open(made.url)
        page.wait_for(f"{ROWS} === 2")
        text = page.text()
        assert "Warmpath" in text
        assert "holds any of it" not in text  # until it is asked for
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
