"""Pages of other sites: what a browser is told of them (CORS)."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from router.openai_api.about import About
from tests.fakes.guarded import key, settings
from tests.fakes.http import MODEL, RouterUnderTest, error_of

CHAT = "https://chat.example"
OTHER = "https://other.example"
# As a browser asks before the JavaScript package `openai` may.
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


async def _preflight(router: RouterUnderTest, path: str, origin: str) -> httpx.Response:
    return await router.client.options(path, headers={"origin": origin, **PREFLIGHT})


def _told(answer: httpx.Response) -> set[str]:
    return {name for name in answer.headers if name.startswith("access-control-")}


async def test_no_other_sites_page_is_let_in_by_default(router: RouterUnderTest) -> None:
    refused = await _preflight(router, "/v1/chat/completions", CHAT)
    assert (refused.status_code, error_of(refused)["code"]) == (405, "method_not_allowed")
    router.client.headers["origin"] = CHAT
    assert not _told(await router.chat())


@pytest.mark.parametrize("allowed", [(CHAT,), ("http://localhost:3000", CHAT), ("*",)])
async def test_an_allowed_page_may_ask_and_read_answers(allowed: tuple[str, ...]) -> None:
    async with RouterUnderTest(allowed_origins=allowed) as router:
        granted = await _preflight(router, "/v1/chat/completions", CHAT)
        assert granted.status_code == 204
        assert "POST" in granted.headers["access-control-allow-methods"]
        assert granted.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        router.client.headers["origin"] = CHAT
        answers = [granted, await router.chat(), await router.chat(stream=True), await router.chat(n=0)]
        answers += [await router.client.get("/live")]  # needs no key, and is for everybody
        assert [answer.status_code for answer in answers] == [204, 200, 200, 400, 200]
        for answer in answers:
            assert answer.headers["access-control-allow-origin"] in (CHAT, "*")
            assert answer.headers["access-control-expose-headers"] == "*"  # x-request-id, retry-after


async def test_a_page_of_an_origin_that_is_not_allowed_is_told_nothing() -> None:
    async with RouterUnderTest(allowed_origins=(CHAT,)) as router:
        for origin in (OTHER, "null", f"{CHAT}.evil", "http://chat.example", f"{CHAT}:8443"):
            refused = await _preflight(router, "/v1/chat/completions", origin)
            assert refused.status_code == 405
            router.client.headers["origin"] = origin
            answer = await router.chat()
            assert not _told(refused) | _told(answer)
            assert answer.headers["vary"] == "Origin"  # a cache must not give it to the page that may


async def test_other_clients_are_answered_as_ever() -> None:
    async with RouterUnderTest(allowed_origins=(CHAT,)) as router:
        assert (await router.chat()).status_code == 200
        options = await router.client.options("/v1/models", headers={"origin": CHAT})  # no preflight
        assert options.status_code == 405


@pytest.mark.parametrize("path", ["/metrics", "/debug/route", "/dashboard", "/dashboard/data"])
async def test_operators_pages_are_never_shown_to_other_sites(path: str) -> None:
    async with RouterUnderTest(allowed_origins=("*",), expose_debug=True, dashboard=True) as router:
        assert not _told(await router.client.get(path, headers={"origin": CHAT}))
        assert not _told(await _preflight(router, path, CHAT))


async def test_a_preflight_needs_no_key_and_an_answer_does(tmp_path: Path) -> None:
    """Browsers send none with a preflight. A page is to see what is wrong with its key."""
    async with RouterUnderTest(tenants=settings(tmp_path), allowed_origins=(CHAT,)) as router:
        assert (await _preflight(router, "/v1/completions", CHAT)).status_code == 204
        body = {"model": MODEL, "prompt": "x"}
        for headers, status in (({}, 401), (key("bob"), 200)):
            answer = await router.client.post(
                "/v1/completions", json=body, headers={"origin": CHAT, **headers}
            )
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == CHAT


async def test_a_failure_is_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_about: About) -> None:
        raise RuntimeError("no handler foresaw this")

    monkeypatch.setattr(About, "models", fail)
    async with RouterUnderTest(allowed_origins=(CHAT,)) as router:
        answer = await router.client.get("/v1/models", headers={"origin": CHAT})
        assert answer.status_code == 500
        assert answer.headers["access-control-allow-origin"] == CHAT
