"""Keys, limits and tenants on a whole deployment, proxy and Ray included, asked by the `openai` client.

And the canary of `tests/canary.py`, looked for in everything that all its processes write.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.canary import CANARY, marks, provoke, traces_of
from tests.fakes.keys import entry, key_file
from tests.servers import Server, running_server

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

LIMITED = entry("limited", limits={"requests_per_minute": 2, "tokens_per_minute": 100_000})
KEYS = [
    entry("alice", tenant="acme"),
    entry("anna", tenant="acme"),
    entry("bob"),
    entry("operator", operator=True),
    LIMITED,
]
SECRET_VARIABLE = "WARMPATH_TEST_SECRET"
PROMPT = "a prompt of some blocks, sent by one tenant and then by another; " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tenants")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    (folder / "keys.yaml").write_text(key_file(*KEYS))
    (folder / "traces").mkdir()
    settings: dict[str, Any] = {
        "tenants": {"keys_file": str(folder / "keys.yaml"), "secret_variable": SECRET_VARIABLE},
        "expose_debug": True,
        "dashboard": True,
        "log_requests": True,
        "record": {"folder": str(folder / "traces")},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET_VARIABLE, "0123456789abcdef" * 2)
        with running_server(replicas=1, router=settings) as running:
            yield running


def client_of(server: Server, name: str, **options: Any) -> openai.OpenAI:
    settings: dict[str, Any] = {"api_key": f"key of {name}", "timeout": 60, "max_retries": 0, **options}
    return openai.OpenAI(base_url=f"{server.url}/v1", **settings)


def ask(server: Server, name: str, prompt: str = PROMPT, **options: Any) -> Any:
    with client_of(server, name, **options) as client:
        return client.completions.create(model="tiny", prompt=prompt, max_tokens=2)


def cached(answer: Any) -> int:
    count: int = answer.usage.prompt_tokens_details.cached_tokens
    return count


def get(server: Server, path: str, name: str | None = None) -> httpx.Response:
    headers = {} if name is None else {"authorization": f"Bearer key of {name}"}
    return httpx.get(server.url + path, headers=headers, timeout=30)


def test_the_launcher_says_that_keys_are_needed(server: Server) -> None:
    said = server.log.read_text()
    assert "API keys  needed; cache scope: tenant" in said
    assert "authorization: Bearer $OPENAI_API_KEY" in said


def test_a_stranger_gets_a_401_everywhere(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        ask(server, "nobody")
    assert caught.value.code == "invalid_api_key"
    assert caught.value.response.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/models", "/metrics", "/version", "/debug/route", "/dashboard", "/openapi.json", "/x"):
        assert get(server, path).status_code == 401, path
    assert get(server, "/health").status_code == get(server, "/live").status_code == 200


def test_operators_pages_are_for_operators(server: Server) -> None:
    for path in ("/metrics", "/debug/route", "/dashboard", "/dashboard/data"):
        assert get(server, path, "bob").status_code == 403, path
        assert get(server, path, "operator").status_code == 200, path


def test_a_tenants_keys_share_a_cache_that_no_other_tenant_finds(server: Server) -> None:
    assert cached(ask(server, "alice")) == 0
    settle()
    assert cached(ask(server, "anna")) > 0
    assert cached(ask(server, "bob")) == 0
    settle()
    assert cached(ask(server, "bob")) > 0


def settle() -> None:
    time.sleep(0.5)  # KV events reach the Router


def test_a_limit_is_a_429_that_says_when_to_come_back(server: Server) -> None:
    with client_of(server, "limited") as client:
        create = client.completions.with_raw_response.create
        answers = [create(model="tiny", prompt="x", max_tokens=1) for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="tiny", prompt="x", max_tokens=1)
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0"]
    assert caught.value.code == "rate_limit_exceeded"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30


def test_keys_are_rotated_without_a_restart(server: Server, folder: Path) -> None:
    """A second key beside the first, then without it; a broken file in between changes nothing."""
    path = folder / "keys.yaml"
    both = entry("bob") | {"sha256": [entry("bob")["sha256"], entry("bob", "new")["sha256"]]}
    others = [each for each in KEYS if each["name"] != "bob"]

    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.get(f"{server.url}/v1/models", headers=headers, timeout=30).status_code

    def until(key: str, expected: int) -> None:
        deadline = time.monotonic() + 15
        while status(key) != expected:
            assert time.monotonic() < deadline, "the file was not followed"
            time.sleep(0.1)

    assert (status("key of bob"), status("new")) == (200, 401)
    path.write_text(key_file(*others, both))
    until("new", 200)
    assert status("key of bob") == 200
    path.write_text("keys: [")
    time.sleep(3)
    assert (status("key of bob"), status("new")) == (200, 200)
    path.write_text(key_file(*others, entry("bob", "new")))
    until("key of bob", 401)
    assert status("new") == 200
    path.write_text(key_file(*KEYS))
    until("key of bob", 200)


def test_nothing_of_a_prompt_is_written_or_shown(server: Server, folder: Path) -> None:
    headers = {"authorization": "Bearer key of bob", "x-session-id": CANARY}
    with httpx.Client(base_url=server.url, timeout=60, headers=headers) as client:
        given_away = marks(client)
        assert provoke(client) > 20
        assert client.post("/v1/completions", json={"model": "tiny", "prompt": CANARY}).status_code == 200
    for path in ("/metrics", "/version", "/debug/route?last=200", "/dashboard/data", "/openapi.json"):
        page = get(server, path, "operator")
        assert page.status_code == 200
        assert not [mark for mark in given_away if mark in page.content], path
    settle()
    logs = list((server.temp).rglob("*.log"))
    assert any("Router" in path.name for path in logs), "no log of the Router was looked at"
    assert any("Replica" in path.name for path in logs), "no log of a replica was looked at"
    assert any((folder / "traces").iterdir()), "nothing was recorded"
    keys = [b"key of bob", b"key of operator"]
    assert traces_of([*given_away, *keys], server.temp) == []
    assert traces_of([*given_away, *keys], folder) == []
