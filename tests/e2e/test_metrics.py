"""One story of the whole fleet at /metrics, through the proxy, whichever of two Routers answers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from tests.e2e.deployments import WITH_TWO_ROUTERS, deployed
from tests.fakes.routers import Values, counted, parsed
from tests.servers import Server, processes_below

CANARY = "xylophone-quartz-7731"
NUM_SCRAPES = 100
LIMIT_S = 60.0

# And the first to ask it: its Routers are counted.
pytestmark = [pytest.mark.long, deployed(WITH_TWO_ROUTERS)]


def scrape(server: Server) -> Values:
    """Over a connection of its own, so that the proxy chooses anew."""
    return parsed(httpx.get(f"{server.url}/metrics", timeout=10).raise_for_status().content)


def routers_up(values: Values) -> dict[str, float]:
    """By name; whoever answered is the first."""
    return {dict(labels)["router"]: v for (name, labels), v in values.items() if name == "warmpath_router_up"}


def total(values: Values, name: str, **labels: str) -> float:
    return sum(
        number
        for (found, pairs), number in values.items()
        if found == name and labels.items() <= dict(pairs).items()
    )


def assert_not_shrunk(before: Values, after: Values) -> None:
    shrunk = {key: (old, after[key]) for key, old in before.items() if key in after and after[key] < old}
    assert not shrunk


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


def ask(server: Server, number: int) -> dict[str, int]:
    body = {"model": "tiny", "prompt": f"{CANARY} {number % 7} " * 20, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    usage: dict[str, int] = answer.raise_for_status().json()["usage"]
    return usage


@contextmanager
def load(server: Server, *, may_fail: bool = False) -> Iterator[list[dict[str, int]]]:
    """Requests by four clients all the while; their usage."""
    done, usages = threading.Event(), []

    def work(first: int) -> None:
        number = first
        while not done.is_set():
            try:
                usages.append(ask(server, number))
            except httpx.HTTPError:
                if not may_fail:
                    raise
            number += 1

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work, first) for first in range(4)]
        try:
            yield usages
        finally:
            done.set()
    for future in futures:
        future.result()


def test_no_counter_shrinks_over_a_hundred_scrapes_under_load(server: Server) -> None:
    answered_by, last = set(), {}
    until(lambda: sorted(routers_up(scrape(server)).values()) == [1.0, 1.0])
    with load(server) as usages:
        until(lambda: len(usages) > 8)
        for _ in range(NUM_SCRAPES):
            values = scrape(server)
            assert len(routers_up(values)) == 2  # on a busy machine one may be late, and keeps its counters
            answered_by.add(next(iter(routers_up(values))))
            now = counted(values)
            assert_not_shrunk(last, now)
            last = now
    assert len(answered_by) == 2  # it was not one of them all the time
    assert total(scrape(server), "warmpath_requests_total", outcome="ok") >= len(usages) > 0


def test_what_routers_and_engines_counted_is_what_was_answered(server: Server) -> None:
    def engines(name: str, **labels: str) -> float:
        return total(scrape(server), name, **labels)

    # What the last test asked for has been reported by the engines: prompts first, the last tokens last.
    until(lambda: engines("vllm:prompt_tokens_total") == engines("warmpath_prompt_tokens_total"))
    until(lambda: engines("vllm:generation_tokens_total") == engines("warmpath_completion_tokens_total"))
    before = scrape(server)
    with ThreadPoolExecutor(4) as pool:
        usages = list(pool.map(lambda number: ask(server, number), range(40)))
    prompt = total(before, "vllm:prompt_tokens_total") + sum(usage["prompt_tokens"] for usage in usages)
    completion = sum(usage["completion_tokens"] for usage in usages)
    generated = total(before, "vllm:generation_tokens_total") + completion
    until(lambda: engines("vllm:prompt_tokens_total") == prompt)
    until(lambda: engines("vllm:generation_tokens_total") == generated)
    after = scrape(server)

    def grown(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    assert grown("vllm:generation_tokens_total") == grown("warmpath_completion_tokens_total") == completion
    assert grown("vllm:request_success_total", finished_reason="length") == len(usages)
    assert grown("warmpath_requests_total", outcome="ok") == len(usages)
    assert grown("vllm:time_to_first_token_seconds_count") == len(usages)
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    by_source = [grown("vllm:prompt_tokens_by_source_total", source=source) for source in sources]
    assert sum(by_source) == grown("vllm:prompt_tokens_total") > by_source[1] > 0
    names = {replica["replica_id"] for replica in server.version()["replicas"]}
    assert {dict(labels)["engine"] for name, labels in after if name.startswith("vllm:")} == names


def test_no_prompt_is_in_it(server: Server) -> None:
    ask(server, 1)
    assert CANARY not in httpx.get(f"{server.url}/metrics", timeout=10).text


def test_a_killed_routers_counters_stand_and_its_successor_has_its_own(server: Server) -> None:
    until(lambda: sorted(routers_up(scrape(server)).values()) == [1.0, 1.0])
    last = counted(scrape(server))
    before = routers_up(scrape(server))
    victim = router_pids(server)[0]
    with load(server, may_fail=True) as usages:
        until(lambda: len(usages) > 8)
        os.kill(victim, signal.SIGKILL)
        seen: list[dict[str, float]] = []
        while not (seen and sorted(seen[-1].values()) == [0.0, 1.0, 1.0]):
            assert len(seen) < 600, "nobody took its place"
            try:
                values = scrape(server)
            except httpx.HTTPError:
                continue  # the proxy has not noticed yet
            assert_not_shrunk(last, counted(values))
            last = {**last, **counted(values)}
            seen.append(routers_up(values))
            time.sleep(0.05)
        gone = {name for name, is_up in seen[-1].items() if not is_up}
        assert gone < before.keys()
        assert seen[-1].keys() > before.keys()
        for _ in range(20):
            values = scrape(server)
            assert_not_shrunk(last, counted(values))
            last = {**last, **counted(values)}
    assert total(values, "warmpath_requests_total", router=gone.pop(), outcome="ok") > 0


def router_pids(server: Server) -> list[int]:
    """Of the processes this test's cluster started."""
    lines = [line for line in processes_below(server.temp) if "ServeReplica:warmpath:Router" in line]
    assert len(lines) == 2
    return [int(line.split(":", 1)[0]) for line in lines]
