"""Ingress and routing hook under a real local Serve, around replicas without a model.

What only Serve can show: ranks are followed, a killed replica's requests go on elsewhere, a client that
leaves stops its generation, several calls of one request do not hang.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cache.fingerprint import Fingerprint, HashAlgorithm
from deploy.ports import free_base
from router.config import RouterConfig
from tests.fakes.serve import (
    BUSY,
    DIE_ALWAYS,
    DIE_BEFORE_FIRST,
    DIE_MID_STREAM,
    FAIL_MID_STREAM,
    FORWARD_FAILED,
    SLOW,
    OrderedReplica,
    text_of,
)

ROOT = Path(__file__).resolve().parents[2]
NUM_REPLICAS = 3
FINGERPRINT = Fingerprint(
    model_id="none",
    revision="1",
    kv_dtype="float32",
    template_digest="",
    block_size=4,
    hash_algorithm=HashAlgorithm.SHA256,
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]  # Ray's own warnings


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the replicas note down, all in one file."""
    return tmp_path_factory.mktemp("replicas") / "journal"


@pytest.fixture(scope="module")
def url(journal: Path) -> Iterator[str]:
    """A Router and three replicas on a Ray cluster of their own; everything ends with the module."""
    ray = pytest.importorskip("ray")
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from router.ingress import Ingress

    temp = tempfile.mkdtemp(prefix="wp", dir="/tmp")  # short: Ray's sockets live below it
    os.environ["RAY_worker_niceness"] = "0"
    port = free_base()
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=temp,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        replica = serve.deployment(
            name="Replica",
            num_replicas=NUM_REPLICAS,
            max_ongoing_requests=100,
            ray_actor_options={"num_cpus": 0.1},
            request_router_config=RequestRouterConfig(
                request_router_class="router.request_router:WarmpathRequestRouter", initial_backoff_s=0.01
            ),
            health_check_period_s=1,
            graceful_shutdown_timeout_s=1,
            graceful_shutdown_wait_loop_s=0.1,
        )(OrderedReplica)
        router = serve.deployment(
            name="Router",
            max_ongoing_requests=1000,
            ray_actor_options={
                "num_cpus": 0.1,
                "runtime_env": {
                    "env_vars": {
                        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
                        "PYTHONPATH": str(ROOT),
                        "HF_HUB_OFFLINE": "1",
                    }
                },
            },
            graceful_shutdown_timeout_s=1,
            graceful_shutdown_wait_loop_s=0.1,
        )(serve.ingress()(Ingress))
        config = RouterConfig(
            model_name="none",
            tokenizer=str(ROOT / "replica" / "models" / "tiny"),
            fingerprint=FINGERPRINT,
            expose_routing=True,
        )
        serve.run(router.bind(config, replica.bind(FINGERPRINT, journal)), name="adapter")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(temp, ignore_errors=True)


@pytest.fixture
def ready(url: str) -> str:
    """All replicas known, replaced if an earlier test killed some."""
    _until(lambda: _health(url).get("replicas") == NUM_REPLICAS and _health(url)["status"] == "ready", 90)
    return url


@pytest.fixture
def deadly(ready: str) -> Iterator[str]:
    """For a test that kills replicas: Serve needs most of a second to see that one is gone."""
    yield ready
    time.sleep(1.0)


def _health(url: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{url}/health", timeout=10).json()
    return answer


def _until(condition: Callable[[], bool], limit_s: float) -> None:
    ends_at = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends_at, "waited too long"
        time.sleep(0.1)


def _body(prompt: Any = "one two three", order: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"model": "none", "prompt": prompt, "max_tokens": 6, "cache_salt": order, **fields}


def _complete(url: str, *args: Any, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=_body(*args, **fields), headers=headers, timeout=60)


def _expected(count: int) -> str:
    return "".join(map(text_of, range(count)))


def _text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_a_prompt_goes_where_it_went_before(ready: str) -> None:
    """Predictions alone, as these replicas report no blocks: the second request follows the first."""
    prompt = list(range(200))
    first = _complete(ready, prompt)
    second = _complete(ready, prompt)
    assert _text(first) == _text(second) == _expected(6)
    assert first.headers["x-warmpath-replica"] == second.headers["x-warmpath-replica"]
    assert second.headers["x-warmpath-overlap-blocks"] == "49"


def test_round_robin_by_header_visits_every_replica(ready: str) -> None:
    headers = {"x-warmpath-policy": "round_robin"}
    answers = [_complete(ready, headers=headers) for _ in range(NUM_REPLICAS)]
    assert len({answer.headers["x-warmpath-replica"] for answer in answers}) == NUM_REPLICAS


def test_the_request_id_is_echoed_once(ready: str) -> None:
    answer = _complete(ready, headers={"x-request-id": "abc-1"})
    assert answer.headers.get_list("x-request-id") == ["abc-1"]


def test_a_batch_of_prompts_does_not_hang(ready: str) -> None:
    """Several handle calls under one request, waiting for a replica at once."""
    answer = _complete(ready, [[1, 2], [3, 4], [5, 6], [7, 8]])
    assert [choice["text"] for choice in answer.json()["choices"]] == [_expected(6)] * 4


def test_a_busy_replica_is_passed_over(ready: str) -> None:
    assert _text(_complete(ready, "x", BUSY)) == _expected(6)


def test_a_failing_forward_is_tried_twice_then_reported(ready: str) -> None:
    answer = _complete(ready, "x", FORWARD_FAILED)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "forward_failed"


def test_a_replica_killed_before_the_first_token_is_not_seen_by_the_client(deadly: str) -> None:
    assert _text(_complete(deadly, "x", DIE_BEFORE_FIRST)) == _expected(6)


def test_a_replica_killed_mid_stream_is_continued_elsewhere(deadly: str) -> None:
    answer = _complete(deadly, "x", DIE_MID_STREAM, max_tokens=10, stream=True)
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(choice["text"] for choice in choices) == _expected(10)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]


def test_a_request_that_kills_replicas_is_refused_after_two(deadly: str) -> None:
    answer = _complete(deadly, "x", DIE_ALWAYS)
    assert answer.status_code == 500, answer.text
    assert answer.json()["error"]["code"] == "too_many_deaths"


def test_a_stream_that_fails_for_good_ends_in_an_error_event_and_a_cut_connection(ready: str) -> None:
    """Not in a clean end, which clients would take for the end of the answer."""
    got = b""
    body = _body("x", FAIL_MID_STREAM, max_tokens=20, stream=True)
    with httpx.Client(timeout=30) as client, pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012
        with client.stream("POST", f"{ready}/v1/completions", json=body) as answer:
            for content in answer.iter_bytes():
                got += content
    *chunks, error = [json.loads(line.removeprefix("data: ")) for line in got.decode().split("\n\n") if line]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == _expected(6)  # two attempts
    assert error["error"]["code"] == "forward_failed"


async def _read_all(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> bytes:
    async with client.stream("POST", url, json=body) as answer:
        return b"".join([content async for content in answer.aiter_bytes()])


@pytest.mark.parametrize("prompt", ["x", ["x", "y", "z"]])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_its_generations(
    ready: str, journal: Path, stream: bool, prompt: Any
) -> None:
    await asyncio.to_thread(journal.write_text, "")
    body = _body(prompt, SLOW, max_tokens=900, stream=stream)
    async with httpx.AsyncClient(timeout=60) as client:
        with pytest.raises((TimeoutError, httpx.HTTPError)):
            await asyncio.wait_for(_read_all(client, f"{ready}/v1/completions", body), timeout=1.0)
    count = 1 if prompt == "x" else len(prompt)
    expected = sorted(["started", "cancelled", "ended"] * count)
    await asyncio.to_thread(_until, lambda: sorted(journal.read_text().split()) == expected, 5.0)


def test_nothing_is_left_in_flight(ready: str) -> None:
    lines = httpx.get(f"{ready}/metrics", timeout=10).text.splitlines()
    values = {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if not line.startswith("#")}
    all_in_flight = [
        value for name, value in values.items() if name.startswith("warmpath_requests_in_flight")
    ]
    assert all_in_flight == [0.0]
    in_flight = [value for name, value in values.items() if name.startswith("warmpath_replica_in_flight")]
    assert in_flight == [0.0] * NUM_REPLICAS
