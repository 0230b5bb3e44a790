"""What can be done on the page: from the keyboard, and pausing it."""

from __future__ import annotations

from tests.chromium import Page
from tests.http.dashboard.bench import Bench
from tests.http.dashboard.looking import LIVE, ROWS, needs_chromium

pytestmark = needs_chromium


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
