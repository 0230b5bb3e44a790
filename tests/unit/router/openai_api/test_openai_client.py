"""The `openai` client against the real API: its types, its errors, its idea of a whole stream."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from cache.errors import DeadlineExceeded, QueueFull
from router.errors import ReplicaLost
from tests.fakes.http import MODEL, RouterUnderTest, counting

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]


@pytest.fixture
async def client(router: RouterUnderTest) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(router.api)
    async with openai.AsyncOpenAI(
        base_url="http://router/v1",
        api_key="none",
        http_client=httpx.AsyncClient(transport=transport),
        max_retries=0,
    ) as made:
        yield made


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,  # type: ignore[arg-type]
        max_completion_tokens=3,
        extra_headers={"x-request-id": "mine"},
        extra_body={"cache_salt": "s", "top_k": 5},
    )
    assert answer.choices[0].message.content == "t0 t1 t2 "
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id == "mine"


async def test_streamed_chat(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "t0 t1 t2 t3 "
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=2)
    assert [choice.text for choice in answer.choices] == ["t0 t1 ", "t0 t1 "]


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_errors_have_the_clients_types(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"best_of": 2})
    assert (bad.value.param, bad.value.code) == ("best_of", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_busy_is_retried_by_the_client(router: RouterUnderTest, client: openai.AsyncOpenAI) -> None:
    asked = 0

    async def busy_at_first(request, replica_id):  # type: ignore[no-untyped-def]
        nonlocal asked
        asked += 1
        if asked <= 2:  # both replicas
            raise QueueFull(1, 1)
        async for delta in counting(request, replica_id):
            yield delta

    router.follow(busy_at_first)
    with pytest.raises(openai.RateLimitError) as caught:
        await client.completions.create(model=MODEL, prompt="a", max_tokens=2)
    assert caught.value.response.headers["retry-after"] == "1"
    patient = client.with_options(max_retries=1)
    assert (await patient.completions.create(model=MODEL, prompt="a", max_tokens=2)).choices[0].text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("seconds", [{}, {"x-warmpath-timeout": "60"}], ids=["ours", "the client's"])
async def test_what_took_too_long_is_not_asked_again_by_the_client(
    seconds: dict[str, str], stream: bool
) -> None:
    """Three times the load is the last thing that a service needs which is too slow already."""
    async with RouterUnderTest(request_timeout_s=60.0 if not seconds else None) as router:
        router.answer_with(DeadlineExceeded(60.0, 60.1))  # says the replica
        transport = httpx.ASGITransport(router.api)
        async with openai.AsyncOpenAI(
            base_url="http://router/v1", api_key="none", http_client=httpx.AsyncClient(transport=transport)
        ) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(model=MODEL, prompt="a", stream=stream, extra_headers=seconds)
        assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
        assert len(router.calls.requests) == 1


async def test_what_killed_its_replicas_is_not_asked_again_by_the_client() -> None:
    async with RouterUnderTest(num_replicas=6) as router:
        router.answer_with(ReplicaLost("gone"))
        transport = httpx.ASGITransport(router.api)
        async with openai.AsyncOpenAI(
            base_url="http://router/v1", api_key="none", http_client=httpx.AsyncClient(transport=transport)
        ) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(model=MODEL, prompt="a")
        assert caught.value.code == "too_many_deaths"
        assert len(router.calls.requests) == router.config.max_deaths
