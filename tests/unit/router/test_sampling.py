"""What holds for fields of sampling that a request does not name."""

from __future__ import annotations

from typing import Any

import pytest

from cache.errors import ConfigError
from router.sampling import ACCEPTED, Sampling
from tests.fakes.http import MODEL, RouterUnderTest
from tests.fakes.router import config

OF_MODEL = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
NEUTRAL = Sampling().model_dump()


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("model", OF_MODEL), ("openai", {}), ({"temperature": 0, "top_k": 5}, {"temperature": 0, "top_k": 5})],
)
async def test_requests_have_what_is_set(setting: Any, expected: dict[str, Any]) -> None:
    async with RouterUnderTest(default_sampling=setting, model_sampling=OF_MODEL) as router:
        for answer in (await router.chat(), await router.complete(), await router.chat(temperature=None)):
            assert answer.status_code == 200
        for _, request in router.calls.requests:
            sampled = {name: getattr(request.sampling, name) for name in ACCEPTED}
            assert sampled == {name: {**NEUTRAL, **expected}[name] for name in ACCEPTED}
        assert (await router.client.get("/version")).json()["default_sampling"] == {**NEUTRAL, **expected}


async def test_a_requests_own_fields_win() -> None:
    own = {"temperature": 1.5, "top_k": -1, "top_p": 1, "repetition_penalty": 1}
    async with RouterUnderTest(model_sampling=OF_MODEL) as router:
        assert (await router.complete(**own)).status_code == 200
        [(_, request)] = router.calls.requests
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.5, 0, 1)
        assert not sampling.is_penalised


@pytest.mark.parametrize(
    ("asked", "expected"),
    [({}, 7), ({"max_tokens": None}, 7), ({"max_tokens": 9}, 9), ({"max_completion_tokens": 3}, 3)],
)
async def test_chats_that_name_no_limit_have_the_models(asked: dict[str, Any], expected: int) -> None:
    """As vLLM has it. Who names more gets more."""
    async with RouterUnderTest(model_sampling={"max_tokens": 7}) as router:
        answer = await router.client.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": [{"role": "user", "content": "a"}], **asked},
        )
        assert answer.status_code == 200
        [(_, request)] = router.calls.requests
        assert request.sampling.max_tokens == expected
        assert (await router.client.get("/version")).json()["default_sampling"]["max_tokens"] == 7


async def test_a_default_limit_beyond_the_context_is_what_is_left() -> None:
    found = []
    for setting in ("openai", {"max_tokens": 1_000_000}):
        async with RouterUnderTest(default_sampling=setting) as router:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
            assert (await router.client.post("/v1/chat/completions", json=body)).status_code == 200
            [(_, request)] = router.calls.requests
            found.append(request.sampling.max_tokens)
    assert found[0] == found[1] < 1_000_000


async def test_completions_keep_the_apis_sixteen() -> None:
    async with RouterUnderTest(model_sampling={"max_tokens": 7}) as router:
        body = {"model": MODEL, "prompt": "a"}
        assert (await router.client.post("/v1/completions", json=body)).status_code == 200
        [(_, request)] = router.calls.requests
        assert request.sampling.max_tokens == 16


async def test_the_schema_has_the_defaults_that_hold() -> None:
    async with RouterUnderTest(default_sampling={"temperature": 0.25}) as router:
        schemas = (await router.client.get("/openapi.json")).json()["paths"]
    for path in ("/v1/chat/completions", "/v1/completions"):
        body = schemas[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
        assert (body["temperature"]["default"], body["top_p"]["default"]) == (0.25, 1.0)


async def test_a_field_that_is_wrong_is_still_refused() -> None:
    async with RouterUnderTest(model_sampling=OF_MODEL) as router:
        answer = await router.client.post(
            "/v1/completions", json={"model": MODEL, "prompt": "a", "temperature": 3}
        )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")


@pytest.mark.parametrize(
    ("setting", "field", "accepted"),
    [
        ("modell", "default_sampling", "must be model, openai, or a mapping"),
        ({"temperature": 2.5}, "default_sampling.temperature", "must be a number between 0 and 2"),
        ({"top_p": 0}, "default_sampling.top_p", "must be a number above 0 and up to 1"),
        ({"top_k": 1.5}, "default_sampling.top_k", f"must be {ACCEPTED['top_k']}"),
        ({"min_p": float("nan")}, "default_sampling.min_p", "must be a number between 0 and 1"),
        (
            {"repetition_penalty": 0},
            "default_sampling.repetition_penalty",
            "must be a number between 0.01 and",
        ),
        ({"max_tokens": 0}, "default_sampling.max_tokens", "must be an integer of at least 1"),
        ({"seed": 5}, "default_sampling.seed", "must be one of temperature, top_p, top_k, min_p"),
    ],
)
def test_what_cannot_be_a_default_is_named(setting: Any, field: str, accepted: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(default_sampling=setting)
    assert refused.value.field == field
    assert refused.value.accepted.startswith(accepted)


@pytest.mark.parametrize("value", [5.0, "0.6", True])
def test_a_models_value_that_cannot_be_had_is_refused_where_it_would_hold(value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        config(model_sampling={"temperature": value})
    assert refused.value.field == "default_sampling"
    assert "generation_config.json has temperature = " in refused.value.accepted
    assert "must be a number between 0 and 2; mend it, or set openai" in refused.value.accepted
    assert config(default_sampling="openai", model_sampling={"temperature": value}).sampling_defaults == {}


def test_a_models_limit_that_cannot_be_had_has_its_files_name() -> None:
    with pytest.raises(ConfigError) as refused:
        config(model_sampling={"max_tokens": 0})
    assert "generation_config.json has max_new_tokens = 0: must be an integer of" in refused.value.accepted
    assert config(default_sampling="openai", model_sampling={"max_tokens": 0}).default_max_tokens is None
