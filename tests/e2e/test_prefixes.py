"""Held prefixes on a whole deployment: two Routers, three replicas, proxy and Ray included.

Warm before traffic, listed and given back by whichever Router the proxy picks, made again where a replica was
killed, also after every Router was.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.e2e.deployments import WITH_TWO_ROUTERS, deployed
from tests.e2e.faults.processes import ROUTER, descendants
from tests.servers import Server

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), deployed(WITH_TWO_ROUTERS)]

SYSTEM = {"role": "system", "content": "You answer sailors' questions, briefly and in verse. " * 12}


def ask(server: Server, method: str, path: str = "", body: dict[str, Any] | None = None) -> Any:
    """A connection of its own, so that the proxy chooses anew."""
    answer = httpx.request(method, f"{server.url}/v1/prefixes{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def hold(server: Server, copies: int, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [SYSTEM], "copies": copies, "seconds": 300, **fields}
    held: dict[str, Any] = ask(server, "POST", body=body)
    return held


def turn(server: Server, number: int) -> tuple[str, int]:
    """(replica, cached tokens) of a conversation's first turn."""
    messages = [SYSTEM, {"role": "user", "content": f"Question {number}?"}]
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"model": "tiny", "messages": messages, "max_tokens": 2},
        headers={"x-warmpath-policy": "round_robin"},  # wherever it is held
        timeout=120,
    )
    cached: int = answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer.headers["x-warmpath-replica"], cached


def eventually(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.2)


def test_warm_before_its_traffic_on_every_copy(server: Server) -> None:
    held = hold(server, copies=3)
    first: dict[str, int] = {}
    for number in range(24):
        replica, cached = turn(server, number)
        first.setdefault(replica, cached)
        if len(first) == 3:
            break
    assert first == dict.fromkeys(held["replicas"], held["tokens"])
    for _ in range(6):  # whichever of the two answers
        assert [told["id"] for told in ask(server, "GET")["data"]] == [held["id"]]
        assert ask(server, "GET", f"/{held['id']}")["status"] == "held"
    assert server.metric("warmpath_engine_pinned_blocks") == 3 * held["blocks"]
    ask(server, "DELETE", f"/{held['id']}")
    for _ in range(6):
        eventually(lambda: ask(server, "GET")["data"] == [], limit_s=10.0)
    eventually(lambda: server.metric("warmpath_engine_pinned_blocks") == 0)
    time.sleep(2.0)  # nobody makes again what was given back
    assert server.metric("warmpath_engine_pinned_blocks") == 0


def test_a_copy_that_was_killed_is_made_again(server: Server) -> None:
    held = hold(server, copies=2)
    victim = next(r for r in server.version()["replicas"] if r["replica_id"] in held["replicas"])
    os.kill(victim["pid"], signal.SIGKILL)

    def is_whole() -> bool:
        told = ask(server, "GET", f"/{held['id']}")
        replicas: list[str] = told["replicas"]
        return told["status"] == "held" and victim["replica_id"] not in replicas

    eventually(is_whole)
    assert server.metric("warmpath_prefix_copies_restored_total") >= 1
    ask(server, "DELETE", f"/{held['id']}")
    eventually(lambda: server.metric("warmpath_engine_pinned_blocks") == 0)


def test_its_only_copy_may_die_and_every_router_still_knows_it(server: Server) -> None:
    """Half of these were 404 while it was made again; what was deleted then came back."""
    for is_deleted in (False, True):
        held = hold(server, copies=1)
        victim = next(r for r in server.version()["replicas"] if r["replica_id"] in held["replicas"])
        os.kill(victim["pid"], signal.SIGKILL)

        def is_whole(held: dict[str, Any] = held, victim: dict[str, Any] = victim) -> bool:
            told = ask(server, "GET", f"/{held['id']}")
            assert held["id"] in [each["id"] for each in ask(server, "GET")["data"]]
            return told["status"] == "held" and victim["replica_id"] not in told["replicas"]

        if not is_deleted:
            eventually(is_whole)
        ask(server, "DELETE", f"/{held['id']}")
        server.wait_until_whole(3)
        for _ in range(6):
            assert ask(server, "GET")["data"] == []
        assert server.metric("warmpath_engine_pinned_blocks") == 0


def test_it_outlives_the_routers_that_knew_of_it(server: Server) -> None:
    """Its tokens come from a replica then."""
    held = hold(server, copies=2)
    for router in [each for each in descendants(server.process.pid) if each.command.startswith(ROUTER)]:
        os.kill(router.pid, signal.SIGKILL)

    def told() -> dict[str, Any]:
        try:
            answer = httpx.get(f"{server.url}/v1/prefixes/{held['id']}", timeout=5)
        except httpx.HTTPError:
            return {}
        return answer.json() if answer.status_code == 200 else {}

    eventually(lambda: told().get("status") == "held")
    eventually(lambda: server.metric("warmpath_prefixes_adopted_total") == 1)
    victim = next(r for r in server.version()["replicas"] if r["replica_id"] in held["replicas"])
    os.kill(victim["pid"], signal.SIGKILL)
    eventually(lambda: told().get("status") == "held" and victim["replica_id"] not in told()["replicas"])
    assert told()["expires_at"] == held["expires_at"]
    holders = told()["replicas"]  # not the killed one's successor, which may be there by now
    found = [cached for replica, cached in (turn(server, 1000 + n) for n in range(6)) if replica in holders]
    assert found
    assert min(found) >= held["tokens"]  # earlier questions may have begun alike
    ask(server, "DELETE", f"/{held['id']}")
    eventually(lambda: server.metric("warmpath_engine_pinned_blocks") == 0)
    server.wait_until_whole(3)
