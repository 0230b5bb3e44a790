"""What is wrong with a request: refused with the field named."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from cache.events import Load, StepTimeModel
from cache.messages import Delta, GenerateRequest
from cache.types import ReplicaId
from router.limits import Limits
from router.openai_api import structure_check
from router.prompts.prompt import NUM_THREADS, OFFLOAD_CHARS
from tests.fakes.http import MODEL, RouterUnderTest, a_replica_info, counting, error_of

SECRET = "a secret prompt"
LIMITS = Limits(
    max_json_depth=6,
    max_messages=2,
    max_prompts=2,
    max_stop_strings=2,
    max_stop_chars=3,
    max_salt_chars=4,
    max_template_bytes=9,
)
BEYOND: list[tuple[str, dict[str, Any], str | None]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 3}, "messages"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 3}]},
        "messages",
    ),
    ("/v1/completions", {"prompt": ["x"] * 3}, "prompt"),
    ("/v1/completions", {"prompt": "x", "stop": ["x"] * 3}, "stop"),
    ("/v1/completions", {"prompt": "x", "stop": "xxxx"}, "stop"),
    ("/v1/completions", {"prompt": "x", "stop_token_ids": [1] * 3}, "stop_token_ids"),
    ("/v1/completions", {"prompt": "x", "cache_salt": "xxxxx"}, "cache_salt"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"abc": "x"}},
        "chat_template_kwargs",
    ),
    ("/v1/completions", {"prompt": "x", "metadata": [[[[[[[]]]]]]]}, None),
]


async def _post(router: RouterUnderTest, content: bytes) -> httpx.Response:
    return await router.client.post("/v1/chat/completions", content=content)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": NaN}', b'{"a": "\xff"}', b"[" * 100_000])
async def test_malformed_json_is_a_400(router: RouterUnderTest, content: bytes) -> None:
    answer = await _post(router, content)
    assert answer.status_code == 400
    assert error_of(answer)["code"] == "malformed_json"


async def test_a_compressed_body_is_told_so(router: RouterUnderTest) -> None:
    body = gzip.compress(b'{"model": "tiny", "prompt": "x"}')
    headers = {"content-encoding": "gzip"}
    answer = await router.client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert "compressed" in error_of(answer)["message"]


async def test_a_body_above_the_limit_is_a_413() -> None:
    async with RouterUnderTest(limits=Limits(max_body_bytes=1024)) as router:
        answer = await _post(router, b" " * 1025)
        assert answer.status_code == 413
        assert error_of(answer)["code"] == "body_too_large"


async def test_headers_above_the_limit_are_a_431(router: RouterUnderTest) -> None:
    answer = await router.client.get("/live", headers={"x-large": "x" * (16 << 10)})
    assert answer.status_code == 431
    assert error_of(answer)["code"] == "headers_too_large"
    assert answer.headers["x-request-id"]
    assert (await router.client.get("/live", headers={"x-large": "x" * (8 << 10)})).status_code == 200


@pytest.mark.parametrize(("path", "body", "param"), BEYOND)
async def test_a_limit_that_was_lowered_holds(path: str, body: dict[str, Any], param: str | None) -> None:
    async with RouterUnderTest(limits=LIMITS) as router:
        answer = await router.client.post(path, json={"model": MODEL, "max_tokens": 1, **body})
        assert answer.status_code == 400
        assert error_of(answer)["param"] == param
    async with RouterUnderTest() as router:
        answer = await router.client.post(path, json={"model": MODEL, "max_tokens": 1, **body})
        assert answer.status_code == 200, answer.text


async def test_an_unknown_model_is_a_404(router: RouterUnderTest) -> None:
    answer = await router.chat(model="other")
    assert answer.status_code == 404
    assert (error_of(answer)["param"], error_of(answer)["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(("prompt", "param"), [("x" * 300, "prompt"), (["a", "x" * 300], "prompt[1]")])
async def test_too_long_a_prompt_names_both_numbers(router: RouterUnderTest, prompt: Any, param: str) -> None:
    answer = await router.complete(prompt)
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "300 in the prompt" in error["message"]
    assert "200 tokens" in error["message"]


FAR_TOO_LONG = "x" * 70_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": FAR_TOO_LONG}]}, "messages"),
        ("/v1/completions", {"prompt": ["a", FAR_TOO_LONG]}, "prompt[1]"),
        ("/v1/prefixes", {"prompt": FAR_TOO_LONG}, "prompt"),
        ("/v1/prefixes", {"messages": [{"role": "user", "content": FAR_TOO_LONG}]}, "messages"),
    ],
)
async def test_what_is_far_too_long_is_not_tokenized_to_its_end(
    router: RouterUnderTest, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await router.client.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "200 tokens, but the prompt has more than that in its first part alone" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop_token_ids": [256]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 17}, "stop_token_ids"),
        ({"min_tokens": 6}, "min_tokens"),
        ({"n": 129}, "n"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"temperature": 3}, "temperature"),
    ],
)
async def test_a_field_out_of_range_is_named(
    router: RouterUnderTest, fields: dict[str, Any], param: str
) -> None:
    answer = await router.chat(SECRET, **fields)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param
    assert SECRET not in answer.text


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({"max_tokens": 5}, 5), ({"max_completion_tokens": 7, "max_tokens": 7}, 7), ({"max_tokens": None}, 16)],
)
async def test_min_tokens_beyond_max_tokens_names_both_numbers(fields: dict[str, Any], limit: int) -> None:
    """Also where the client sent but one of them: the model's own default is no number that it knows."""
    async with RouterUnderTest(default_sampling={"max_tokens": 16}) as router:
        for ask in (router.chat, router.complete):
            answer = await ask(min_tokens=30, **fields)
            message = error_of(answer)["message"]
            assert (answer.status_code, error_of(answer)["param"]) == (400, "min_tokens")
            assert f"between 0 and max_tokens ({limit}), this one is 30." in message
            assert ("Set 'max_tokens'" in message) is (fields == {"max_tokens": None})


@pytest.mark.parametrize("prompt", [[256], [0, 1 << 20], "", [[1], [300]]])
async def test_token_ids_outside_the_vocabulary_and_empty_prompts_are_refused(
    router: RouterUnderTest, prompt: Any
) -> None:
    answer = await router.complete(prompt)
    assert answer.status_code == 400
    assert error_of(answer)["param"].startswith("prompt")


@pytest.mark.parametrize(
    ("path", "name", "more"),
    [("chat", "top_logprobs", {"logprobs": True}), ("complete", "logprobs", {})],
)
async def test_so_many_log_probabilities_and_no_more(path: str, name: str, more: dict[str, Any]) -> None:
    async with RouterUnderTest(limits=Limits(max_logprobs=3)) as router:
        ask = getattr(router, path)
        assert (await ask(**{name: 3, **more})).status_code == 200
        for beyond, text in ((4, "at most 3"), (21, "between 0 and 20")):
            answer = await ask(**{name: beyond, **more})
            assert (answer.status_code, error_of(answer)["param"]) == (400, name)
            assert text in error_of(answer)["message"]


async def test_the_longest_a_client_may_wait_is_a_limit() -> None:
    async with RouterUnderTest(limits=Limits(max_timeout_seconds=30)) as router:
        body = {"model": MODEL, "prompt": "x"}
        for timeout, status in (("30", 200), ("30.5", 400)):
            headers = {"x-warmpath-timeout": timeout}
            answer = await router.client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == status
        assert error_of(answer)["param"] == "x-warmpath-timeout"
        assert "up to 30." in error_of(answer)["message"]


async def test_structures_beyond_those_that_may_wait_come_back_later(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(structure_check, "judge", lambda _structure: gate.wait(20) and None)
    async with RouterUnderTest(limits=Limits(max_pending_structures=1)) as router:
        first = asyncio.create_task(router.complete(guided_regex="a"))
        while not router.metric("warmpath_structures_pending"):  # noqa: ASYNC110
            await asyncio.sleep(0)
        answer = await router.complete(guided_regex="b")
        assert (answer.status_code, error_of(answer)["code"]) == (429, "server_busy")
        assert answer.headers["retry-after"]
        gate.set()
        assert (await first).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": MODEL, "prompt": ["x", "x" * (OFFLOAD_CHARS + 1)]}),
        (
            "/v1/chat/completions",
            {"model": MODEL, "messages": [{"role": "user", "content": "x" * (OFFLOAD_CHARS + 1)}]},
        ),
        ("/v1/prefixes", {"model": MODEL, "prompt": "x" * (OFFLOAD_CHARS + 1)}),
        ("/tokenize", {"prompt": "x" * (OFFLOAD_CHARS + 1)}),
        ("/detokenize", {"tokens": [1] * (OFFLOAD_CHARS + 1)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_prompts_behind_too_much_tokenization_come_back_later(path: str, body: dict[str, Any]) -> None:
    """No replica has heard of them: who waits there was all that `max_wait_s` bounded."""
    gate = threading.Event()
    async with RouterUnderTest(max_wait_s=0.02) as router:
        try:
            for _ in range(NUM_THREADS):
                router.encoder._threads.submit("another", gate.wait)
            assert router.metric("warmpath_tokenization_pending") == NUM_THREADS
            answer = await router.client.post(path, json=body)
            assert (answer.status_code, error_of(answer)["code"]) == (429, "server_busy")
            assert "to be tokenized first" in error_of(answer)["message"]
            assert answer.headers["retry-after"] == "1"
            assert router.metric("warmpath_tokenization_pending") == NUM_THREADS
            assert (await router.complete()).status_code == 200  # a short one needs no thread
            assert len(router.calls.requests) == 1
        finally:
            gate.set()


@pytest.mark.parametrize("binding", ["at_once", "late"])
async def test_a_batch_on_an_idle_fleet_is_not_refused_for_its_own_work(binding: str) -> None:
    """A second each, twelve of them, where nobody may wait for longer than two."""
    pace = StepTimeModel(base_s=0.0, per_token_s=0.01, per_attention_s=0.0, per_sequence_s=0.0)
    idle = Load(free_blocks=1000, total_blocks=1000, step_time=pace)

    async def slow(request: GenerateRequest, name: ReplicaId) -> AsyncIterator[Delta]:
        await asyncio.sleep(0.01)
        async for delta in counting(request, name):
            yield delta

    async with RouterUnderTest(num_replicas=1, binding=binding, max_wait_s=2.0) as router:
        router.follow(slow)
        router.parts.routing.on_load(router.replicas[0], idle)
        prompts = [f"{number:02}" + "x" * 98 for number in range(12)]
        asked = asyncio.create_task(router.complete(prompt=prompts, max_tokens=1))
        while not asked.done():
            await asyncio.sleep(0.005)
            router.parts.routing.on_load(router.replicas[0], idle)
        answer = await asked
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"]) == len(prompts)


# --- tokens that the model does not know ----------------------------------------------------------


@pytest.fixture
async def smaller_model() -> AsyncIterator[RouterUnderTest]:
    """Its tokenizer has 256 tokens and its model 120, of which "x" is none; not all replicas tell."""
    async with RouterUnderTest() as router:
        earlier = router.parts.routing.replicas
        newer = {ReplicaId("newer"): a_replica_info(vocab_size=ord("x"))}
        router.parts.routing.update_replicas({**earlier, **newer})
        yield router


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [1, 120, 2]}, "prompt[1]"),
        ("/v1/completions", {"prompt": [[1], [119, 120]]}, "prompt[1][1]"),
        ("/v1/completions", {"prompt": "hexagon"}, "prompt"),
        ("/v1/completions", {"prompt": ["good", "hexagon"]}, "prompt[1]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hexagon"}]}, "messages"),
        ("/v1/completions", {"prompt": "good", "logit_bias": {"120": 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": "good", "stop_token_ids": [120]}, "stop_token_ids"),
        ("/v1/prefixes", {"prompt": [120, 1, 2, 3]}, "prompt[0]"),
        ("/v1/prefixes", {"prompt": "hexagon"}, "prompt"),
        ("/v1/prefixes", {"messages": [{"role": "system", "content": "hexagon"}]}, "messages"),
    ],
)
async def test_a_token_that_the_model_does_not_know_is_the_requests_fault(
    smaller_model: RouterUnderTest, path: str, body: dict[str, Any], param: str
) -> None:
    """Every replica was tried, each refused it, and the client was told to try again (503)."""
    answer = await smaller_model.client.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param
    assert "119" in error_of(answer)["message"]
    assert not smaller_model.calls.requests


async def test_tokens_that_the_model_knows_are_served(smaller_model: RouterUnderTest) -> None:
    answer = await smaller_model.complete([0, 119], logit_bias={"119": 1})
    assert answer.status_code == 200, answer.text
    assert (await smaller_model.chat("welcome")).status_code == 200
