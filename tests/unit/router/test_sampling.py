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
            sampled = {name: getattr(request.sampling, name) for name in NEUTRAL}
            assert sampled == {**NEUTRAL, **expected}
        assert (await router.client.get("/version")).json()["default_sampling"] == {**NEUTRAL, **expected}


async def test_a_requests_own_fields_win() -> None:
    own = {"temperature": 1.5, "top_k": -1, "top_p": 1, "repetition_penalty": 1}
    async with RouterUnderTest(model_sampling=OF_MODEL) as router:
        assert (await router.complete(**own)).status_code == 200
        [(_, request)] = router.calls.requests
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.5, 0, 1)
        assert not sampling.is_penalised


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
        ({"max_tokens": 5}, "default_sampling.max_tokens", "must be one of temperature, top_p, top_k, min_p"),
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
