"""What dies under a request, through real processes: a replica, unseen, or the Router, which costs it.

Serve replaces both. Behind one proxy, as none continues an answer; `test_serve_adapter.py` has the other. The
last that is asked of this deployment: who has just come knows no pace yet.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.e2e.deployments import FAST_PROXY, USUAL, deployed
from tests.servers import Server, processes_below

pytestmark = deployed(USUAL)


def test_replica_killed_mid_stream_continues_with_the_same_text(server: Server) -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Tell me of the sea."}],
        "max_tokens": 400,
        "temperature": 0,
        "ignore_eos": True,
    }
    url = f"{server.url}/v1/chat/completions"
    whole = httpx.post(url, json=body, timeout=60).json()["choices"][0]["message"]["content"]
    text, killed, done = "", False, False
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as answer:
        replica = answer.headers["x-warmpath-replica"]
        pid = next(each["pid"] for each in server.version()["replicas"] if each["replica_id"] == replica)
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                chunk = json.loads(line[6:])
                text += chunk["choices"][0]["delta"].get("content") or ""
                if not killed:
                    os.kill(pid, signal.SIGKILL)
                    killed = True
    assert done
    assert text == whole
    server.wait_until_whole()


def test_a_router_that_dies_under_a_request_loses_it_or_comes_back_in_time_for_it(server: Server) -> None:
    """What was lost with it is an error, in our shape where proxies let us; nobody gets a part for all."""
    (router,) = [line for line in processes_below(server.temp) if re.search(r"ray::.*Router", line)]
    # Seconds of work: long enough to die under, and done in time if all of it is asked again.
    body = {"model": "tiny", "prompt": "The sea", "max_tokens": 1000, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
        deadline = time.monotonic() + 30
        while not server.metric("warmpath_requests_in_flight") and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(int(router.split(":")[0]), signal.SIGKILL)
        if (
            FAST_PROXY
        ):  # a page of its own, or a cut connection, or all of it from the next Router, asked again
            assert not isinstance(lost.exception(60), httpx.TimeoutException)
            if lost.exception() is None and lost.result().status_code < 500:
                assert lost.result().json()["usage"]["completion_tokens"] == body["max_tokens"]
        else:
            answer = lost.result(60)
            assert answer.status_code == 500
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert answer.headers["x-request-id"]
    server.wait_until_whole()
    body["max_tokens"] = 2
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
