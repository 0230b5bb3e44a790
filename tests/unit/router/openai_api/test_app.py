"""The routes beside generation, one error shape on wrong ones, and what is counted of every request."""

from __future__ import annotations

import json

import pytest

from cache import block_hash
from cache.types import ReplicaId
from router.index import packed_table
from router.openai_api.about import Readiness
from router.placement import passing, use_counts
from router.pricing import cost
from tests.fakes.http import MAX_MODEL_LEN, MODEL, RouterUnderTest, a_replica_info, error_of


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/nope", 404),
        ("POST", "/v1/embeddings", 404),
    ],
)
async def test_wrong_routes_have_the_same_error_shape(
    router: RouterUnderTest, method: str, path: str, status: int
) -> None:
    answer = await router.client.request(method, path)
    assert answer.status_code == status
    error_of(answer)
    assert ("allow" in answer.headers) is (status == 405)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/chat/completions", "//v1/completions"])
async def test_a_route_that_is_not_there_is_told_with_those_that_are(
    router: RouterUnderTest, path: str
) -> None:
    """Several clients ask for `responses` unless they are told not to, and show nothing but the message."""
    error = error_of(await router.client.post(f"http://test{path}", json={}))
    assert error["code"] == "unknown_url"
    assert f"at {path}." in error["message"]
    assert "/v1/chat/completions" in error["message"]
    listed = (await router.client.get("/openapi.json")).json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions"} <= set(listed)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/prefixes", "GET, POST"),
        ("POST", "/v1/prefixes/prefix-1", "DELETE, GET"),
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/models/x", "GET"),
        ("POST", "/health", "GET, HEAD"),
    ],
)
async def test_every_method_of_a_path_is_told(
    router: RouterUnderTest, method: str, path: str, allowed: str
) -> None:
    """Those of the first route alone were."""
    answer = await router.client.request(method, path)
    assert (answer.status_code, answer.headers.get_list("allow")) == (405, [allowed])


async def test_health_tells_why_not(router: RouterUnderTest) -> None:
    assert (await router.client.get("/health")).status_code == 200
    router.parts.service.readiness = lambda: Readiness("no replica is known", 0)
    answer = await router.client.get("/health")
    assert (answer.status_code, answer.json()["reason"]) == (503, "no replica is known")
    assert (await router.client.get("/live")).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/live"])
async def test_probes_may_ask_for_the_head_alone(router: RouterUnderTest, path: str) -> None:
    """It was a 405."""
    for reason in (None, "no replica is known"):
        router.parts.service.readiness = lambda reason=reason: Readiness(reason, 0)  # type: ignore[misc]
        whole, head = await router.client.get(path), await router.client.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b"")
        assert head.headers["content-length"] == whole.headers["content-length"]


async def test_models_name_the_context_length(router: RouterUnderTest) -> None:
    (card,) = (await router.client.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"]) == (MODEL, MAX_MODEL_LEN)
    assert (await router.client.get(f"/v1/models/{MODEL}")).json() == card


async def test_version_tells_what_each_replica_computes_on(router: RouterUnderTest) -> None:
    in_two = a_replica_info(device="cuda:0", num_ranks=2, attention_backend="triton")
    routing = router.parts.routing
    routing.update_replicas({**routing.replicas, ReplicaId("in-two"): in_two})
    replicas = (await router.client.get("/version")).json()["replicas"]
    shown = {
        each["replica_id"]: (each["device"], each["num_ranks"], each["attention_backend"])
        for each in replicas
    }
    assert shown == {
        **dict.fromkeys(router.replicas, ("cpu", 1, "none")),
        "in-two": ("cuda:0", 2, "triton"),
    }


async def test_version_tells_how_blocks_are_hashed_and_decisions_made(router: RouterUnderTest) -> None:
    version = (await router.client.get("/version")).json()
    algorithm = router.config.fingerprint.hash_algorithm
    assert (version["hash_algorithm"], version["compiled_hashes"]) == (
        algorithm.value,
        block_hash.IS_COMPILED,
    )
    deciding = (packed_table, cost, passing, use_counts)
    assert version["compiled_decisions"] == all(module.IS_COMPILED for module in deciding)


async def test_metrics_and_the_api_description_are_served(router: RouterUnderTest) -> None:
    await router.chat()
    text = (await router.client.get("/metrics")).text
    name = router.parts.fleet.router
    assert f'warmpath_requests_total{{endpoint="chat/completions",outcome="ok",router="{name}"}} 1.0' in text
    assert f'warmpath_router_up{{router="{name}"}} 1.0' in text
    assert "vllm:num_requests_running" in text
    paths = (await router.client.get("/openapi.json")).json()["paths"]
    assert "temperature" in json.dumps(paths["/v1/chat/completions"]["post"]["requestBody"])


async def test_every_request_is_counted_once(router: RouterUnderTest) -> None:
    await router.chat()
    await router.chat(stream=True)
    await router.chat(length_penalty=2)
    await router.chat(model="x")
    counted = {
        outcome: router.metric("warmpath_requests_total", endpoint="chat/completions", outcome=outcome)
        for outcome in ("ok", "invalid", "not_found", "cancelled", "failed")
    }
    assert counted == {"ok": 2, "invalid": 1, "not_found": 1, "cancelled": 0, "failed": 0}


async def test_unknown_fields_are_accepted_and_counted(router: RouterUnderTest) -> None:
    assert (await router.chat(frobnicate=1, user="u")).status_code == 200
    assert router.metric("warmpath_unknown_fields_total") == 1
