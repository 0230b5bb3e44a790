"""Who may see the page: with an operators' token, and with API keys."""

from __future__ import annotations

import hashlib
from pathlib import Path

from router.tenants.settings import TenantSettings
from tests.chromium import Browser, Page
from tests.http.dashboard.bench import bench
from tests.http.dashboard.looking import LIVE, POOR_CONTRAST, keep, needs_chromium

pytestmark = needs_chromium


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
