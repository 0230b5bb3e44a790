"""Every row of API conformance, asked by the `openai` client over real HTTP of real engines.

The Router runs behind uvicorn in this process, with engines over the embedded model as its replicas; only
Ray is not there. Rows about failures ask a Router whose replicas follow a script. `make conformance` prints
the table.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import openai
import pytest

from cache.errors import QueueFull
from cache.messages import Delta, FinishReason, GenerateRequest
from cache.types import ReplicaId
from router.config import RouterConfig
from tests.conformance import ROWS, row
from tests.fakes.http import RouterUnderTest, counting, events_of
from tests.fakes.tokenizers import HERMES, a_tokenizer
from tests.http_server import MODEL, HttpServer, engine_server, scripted_server

BLOCK = 16
MESSAGES: Any = [{"role": "user", "content": "Tell me of the sea, please."}]


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with engine_server(expose_routing=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as made:
        yield made


def client_of(server: HttpServer, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=60, **{"max_retries": 0, **options}
    )


def chat(client: openai.OpenAI, content: Any = None, **fields: Any) -> Any:
    """A greedy chat of up to 8 tokens."""
    messages = MESSAGES if content is None else [{"role": "user", "content": content}]
    defaults = {"model": MODEL, "messages": messages, "temperature": 0}
    if "max_completion_tokens" not in fields:
        defaults["max_tokens"] = 8
    extra = {"ignore_eos": True, **fields.pop("extra_body", {})}
    return client.chat.completions.create(**{**defaults, **fields}, extra_body=extra)


def complete(client: openai.OpenAI, prompt: Any = "The sea", **fields: Any) -> Any:
    """A greedy completion of 8 tokens."""
    extra = {"ignore_eos": True, **fields.pop("extra_body", {})}
    defaults = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    return client.completions.create(prompt=prompt, **{**defaults, **fields}, extra_body=extra)


def unique(words: int = 40) -> str:
    return f"{uuid.uuid4()} " * words


def cached(answer: Any) -> int:
    count = answer.usage.prompt_tokens_details.cached_tokens
    assert isinstance(count, int)
    return count


def metric(server: HttpServer, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + " ", name + "{"))]
    assert values, f"no metric {name}"
    return sum(values)


def assert_error(body: Any, *, param: str | None, code: str) -> None:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)


def assert_refused(ask: Any, client: openai.OpenAI, param: str, value: Any) -> None:
    """400 `unsupported_parameter` naming the field."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body={param: value})
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


# --- routes -----------------------------------------------------------------------------------------


@row("POST /v1/completions", "prompt: a string")
def test_completions(client: openai.OpenAI) -> None:
    answer = complete(client)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


@row("POST /v1/chat/completions")
def test_chat_completions(client: openai.OpenAI) -> None:
    answer = chat(client)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 8


@row("GET /v1/models and /v1/models/{id}, with max_model_len")
def test_models(client: openai.OpenAI) -> None:
    (listed,) = client.models.list().data
    card = client.models.retrieve(MODEL)
    assert listed.id == card.id == MODEL
    assert card.model_dump()["max_model_len"] == 512 * BLOCK
    assert card.model_dump()["root"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@row("GET /health and /live")
def test_health(server: HttpServer) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ready", "replicas": 2}
    assert httpx.get(f"{server.url}/live").status_code == 200


@row("GET /metrics on the serving port")
def test_metrics(server: HttpServer, client: openai.OpenAI) -> None:
    before = metric(server, "warmpath_requests_total")
    complete(client)
    assert metric(server, "warmpath_requests_total") == before + 1


@row("GET /version")
def test_version(server: HttpServer) -> None:
    version = httpx.get(f"{server.url}/version").json()
    assert {"version", "revision", "fingerprint"} <= set(version)
    assert len(version["replicas"]) == 2


@row("POST /tokenize and /detokenize")
def test_tokenize(server: HttpServer, client: openai.OpenAI) -> None:
    """The ids are those the model is given: a completion of them has the same prompt and the same text."""
    text = "The sea is grüßend 🌊."
    tokenized = httpx.post(f"{server.url}/tokenize", json={"model": MODEL, "prompt": text}).json()
    assert tokenized["count"] == len(tokenized["tokens"])
    assert tokenized["max_model_len"] == 512 * BLOCK
    by_text, by_ids = complete(client, text), complete(client, tokenized["tokens"])
    assert by_text.usage.prompt_tokens == by_ids.usage.prompt_tokens == tokenized["count"]
    assert by_text.choices[0].text == by_ids.choices[0].text
    back = httpx.post(f"{server.url}/detokenize", json={"model": MODEL, "tokens": tokenized["tokens"]})
    assert back.json() == {"prompt": text}


@row("/v1/embeddings and other routes: 404, not 500")
def test_routes_that_are_not_there(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model=MODEL, input="x")
    assert caught.value.code == "unknown_url"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="x")


@row("/openapi.json")
def test_openapi(server: HttpServer) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize"} <= set(paths)


# --- prompts ----------------------------------------------------------------------------------------


@row("prompt: token ids")
def test_a_prompt_of_token_ids(client: openai.OpenAI) -> None:
    assert complete(client, list(range(100, 140))).usage.prompt_tokens == 40


@row("prompt: a list of strings")
def test_a_batch_of_strings(client: openai.OpenAI) -> None:
    prompts = [f"Prompt number {index}" for index in range(8)]
    batch = complete(client, prompts)
    assert [choice.index for choice in batch.choices] == list(range(8))
    alone = [complete(client, prompt) for prompt in prompts]
    assert [choice.text for choice in batch.choices] == [answer.choices[0].text for answer in alone]
    assert batch.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)
    assert batch.usage.completion_tokens == 64


@row("prompt: a list of strings")
def test_a_batch_of_64_prompts_is_64_decisions(server: HttpServer, client: openai.OpenAI) -> None:
    before = metric(server, "warmpath_decisions_total")
    answer = complete(client, [unique(2) for _ in range(64)], max_tokens=2)
    assert len(answer.choices) == 64
    assert metric(server, "warmpath_decisions_total") == before + 64


@row("prompt: a list of lists of token ids")
def test_a_batch_of_token_ids(client: openai.OpenAI) -> None:
    batch = complete(client, [[100, 101, 102], [103, 104]])
    assert batch.usage.prompt_tokens == 5
    alone = [complete(client, ids).choices[0].text for ids in ([100, 101, 102], [103, 104])]
    assert [choice.text for choice in batch.choices] == alone


@row("content as a list of text parts")
def test_content_parts_are_their_concatenation(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "of the sea."}]
    by_parts, whole = chat(client, parts), chat(client, "Tell me of the sea.")
    assert by_parts.usage.prompt_tokens == whole.usage.prompt_tokens
    assert by_parts.choices[0].message.content == whole.choices[0].message.content


# --- length and sampling ----------------------------------------------------------------------------


@row("max_tokens and max_completion_tokens")
def test_both_names_of_the_limit(client: openai.OpenAI) -> None:
    assert chat(client, max_tokens=3).usage.completion_tokens == 3
    assert chat(client, max_completion_tokens=4).usage.completion_tokens == 4
    answer = client.completions.create(model=MODEL, prompt="The sea", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16  # the API's default


@row("temperature")
def test_temperature_0_is_greedy_and_higher_ones_are_not(client: openai.OpenAI) -> None:
    greedy = {complete(client, "Greedy", temperature=0).choices[0].text for _ in range(3)}
    drawn = {complete(client, "Greedy", temperature=1.5).choices[0].text for _ in range(4)}
    assert len(greedy) == 1
    assert len(drawn) > 1


@row("top_p")
def test_a_tiny_nucleus_is_greedy(client: openai.OpenAI) -> None:
    narrow = complete(client, temperature=1, top_p=1e-6).choices[0].text
    assert narrow == complete(client).choices[0].text


@row("top_k")
def test_the_one_best_token_is_greedy(client: openai.OpenAI) -> None:
    narrow = complete(client, temperature=1, extra_body={"top_k": 1}).choices[0].text
    assert narrow == complete(client).choices[0].text


@row("seed")
def test_a_seed_draws_the_same_text_again(client: openai.OpenAI) -> None:
    texts = [complete(client, temperature=1, seed=seed, max_tokens=16).choices[0].text for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


@row("stop")
@pytest.mark.parametrize("as_list", [True, False])
def test_stop_ends_before_the_string(client: openai.OpenAI, as_list: bool) -> None:
    whole = complete(client, max_tokens=16).choices[0].text
    stop = whole[6:9]
    answer = complete(client, max_tokens=16, stop=[stop] if as_list else stop)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


@row("ignore_eos")
def test_ignore_eos_generates_to_the_limit(client: openai.OpenAI) -> None:
    """A chat that ends by itself, and one that is not let."""
    by_itself = next(
        answer
        for seed in range(200)
        if (
            answer := chat(client, temperature=2, seed=seed, max_tokens=200, extra_body={"ignore_eos": False})
        )
        .choices[0]
        .finish_reason
        == "stop"
    )
    assert by_itself.usage.completion_tokens < 200
    assert chat(client, max_tokens=200, extra_body={"ignore_eos": True}).usage.completion_tokens == 200


@row("stop_token_ids")
def test_stop_token_ids_end_the_answer(server: HttpServer, client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=8).choices[0].text
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": whole}).json()["tokens"]
    answer = complete(client, max_tokens=8, extra_body={"stop_token_ids": ids[:16]})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 8


@row("min_tokens")
def test_min_tokens_hold_off_the_stop(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=12).choices[0].text
    stop = whole[:2]
    early = complete(client, max_tokens=12, stop=stop)
    late = complete(client, max_tokens=12, stop=stop, extra_body={"min_tokens": 10})
    assert early.usage.completion_tokens < 10 <= late.usage.completion_tokens


# --- streams ----------------------------------------------------------------------------------------


@row("stream, [DONE], one finish_reason")
@pytest.mark.parametrize("ask", [chat, complete])
def test_streaming_equals_not_streaming(client: openai.OpenAI, ask: Any) -> None:
    whole = ask(client, max_tokens=24).choices[0]
    chunks = list(ask(client, max_tokens=24, stream=True))
    text = "".join(
        (choice.delta.content or "") if ask is chat else choice.text
        for chunk in chunks
        for choice in chunk.choices
    )
    assert text == (whole.message.content if ask is chat else whole.text)
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


@row("stream, [DONE], one finish_reason")
def test_nothing_follows_done(server: HttpServer) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "stream": True}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)
    assert events_of(answer.content)[-1] == "[DONE]"
    assert answer.content.endswith(b"data: [DONE]\n\n")


@row("no chunk before the first token is computed")
def test_no_chunk_comes_before_the_first_token() -> None:
    """Not even the answer's head: a client that times its first chunk times the first token."""
    release: list[asyncio.Event] = []

    async def slow(request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        release.append(asyncio.Event())
        await release[-1].wait()
        yield Delta("a", (1,), 0)
        yield Delta("b", (2,), 0, FinishReason.STOP)

    router = RouterUnderTest()
    router.follow(slow)
    body = {"model": MODEL, "messages": MESSAGES, "stream": True}
    with scripted_server(router) as server, socket.create_connection(("127.0.0.1", server.port), 10) as link:
        link.sendall(raw_post("/v1/chat/completions", json.dumps(body).encode()))
        wait_for(lambda: bool(release))
        link.settimeout(0.3)
        with pytest.raises(TimeoutError):
            link.recv(1)
        server.loop.call_soon_threadsafe(release[0].set)
        link.settimeout(10)
        content = b""
        while b"[DONE]" not in content:
            content += link.recv(65536)
    first = next(line for line in content.split(b"\n") if line.startswith(b"data: "))
    assert json.loads(first[6:])["choices"][0]["delta"] == {"role": "assistant", "content": "a"}


@row("stream_options.include_usage")
@pytest.mark.parametrize("ask", [chat, complete])
def test_usage_comes_in_a_last_chunk_without_choices(client: openai.OpenAI, ask: Any) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


@row("stream_options.continuous_usage_stats")
def test_usage_so_far_comes_with_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(client, max_tokens=24, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 24


# --- the cache --------------------------------------------------------------------------------------


@row("usage.prompt_tokens_details.cached_tokens")
@pytest.mark.parametrize("stream", [True, False])
def test_cached_tokens_are_there_cold_and_warm(client: openai.OpenAI, stream: bool) -> None:
    prompt = unique()
    counts = []
    for _ in range(2):
        if stream:
            *_, last = chat(client, prompt, stream=True, stream_options={"include_usage": True})
        else:
            last = chat(client, prompt)
        counts.append((cached(last), last.usage.prompt_tokens))
    (cold, size), (warm, _) = counts
    assert cold == 0
    assert warm == (size - 1) // BLOCK * BLOCK > 0


@row("cache_salt")
def test_another_salt_does_not_hit(client: openai.OpenAI) -> None:
    prompt = unique()
    salts = [None, None, "one", "two", "one"]
    counts = [cached(chat(client, prompt, extra_body={"cache_salt": salt})) for salt in salts]
    assert counts[0] == counts[2] == counts[3] == 0
    assert counts[1] == counts[4] > 0


@row("prompt_cache_key is a hint")
def test_the_cache_key_separates_nothing(client: openai.OpenAI) -> None:
    prompt = unique()
    counts = [cached(chat(client, prompt, prompt_cache_key=key)) for key in ("one", "two")]
    assert counts[0] == 0 < counts[1]


@row("session header")
def test_a_session_is_kept_in_one_place() -> None:
    headers = [{"x-session-id": "s"}, {"x-session-affinity": "s"}, {}]
    spread = []
    for header in headers:
        router = RouterUnderTest(num_replicas=8, policy="session_affinity")
        with scripted_server(router) as server, client_of(server) as client:
            for prompt in ("one", "two", "three", "four"):
                complete(client, prompt, extra_headers=header)
        spread.append(len({replica for replica, _ in router.calls.requests}))
    assert spread[:2] == [1, 1]
    assert spread[2] > 1


@row("routing headers behind a switch")
def test_routing_headers(client: openai.OpenAI) -> None:
    prompt = unique()
    raw = [
        client.completions.with_raw_response.create(model=MODEL, prompt=prompt, max_tokens=2)
        for _ in range(2)
    ]
    assert raw[0].headers["x-warmpath-replica"] == raw[1].headers["x-warmpath-replica"]
    assert raw[0].headers["x-warmpath-cached-tokens"] == "0"
    assert int(raw[1].headers["x-warmpath-cached-tokens"]) > 0
    with scripted_server(RouterUnderTest()) as closed, client_of(closed) as other:
        quiet = other.completions.with_raw_response.create(model=MODEL, prompt="x", max_tokens=2)
    assert not [name for name in quiet.headers if name.startswith("x-warmpath-")]


# --- fields -----------------------------------------------------------------------------------------


@row("unknown fields are accepted and counted")
def test_unknown_fields(server: HttpServer, client: openai.OpenAI) -> None:
    before = metric(server, "warmpath_unknown_fields_total")
    names = [uuid.uuid4().hex for _ in range(5)]
    for name in names:
        chat(client, extra_body={name: 1})
    assert metric(server, "warmpath_unknown_fields_total") == before + 5
    text = httpx.get(f"{server.url}/metrics").text
    assert not [name for name in names if name in text]  # the names become no labels


@row("x-request-id in and out")
def test_the_request_id_comes_back(client: openai.OpenAI) -> None:
    answer = chat(client, extra_headers={"x-request-id": "mine-7"})
    assert answer._request_id == "mine-7"
    assert answer.id.startswith("chatcmpl-mine-7-")
    assert chat(client)._request_id  # one is made where none was sent
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, n=2, extra_headers={"x-request-id": "mine-8"})
    assert caught.value.request_id == "mine-8"


@row("n > 1")
@pytest.mark.parametrize("n", [2, 16, 10**9])
def test_n_is_refused_by_name(client: openai.OpenAI, n: int) -> None:
    """However large: nothing is allocated for what is refused."""
    assert_refused(complete, client, "n", n)
    assert len(complete(client, n=1).choices) == 1


@row("n > 1")
@pytest.mark.xfail(raises=openai.BadRequestError, reason="one answer per prompt", strict=True)
def test_n_answers(client: openai.OpenAI) -> None:
    answer = chat(client, n=3, temperature=1, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3


@row("min_p")
def test_min_p_is_refused_by_name(client: openai.OpenAI) -> None:
    assert_refused(complete, client, "min_p", 0.1)
    assert complete(client, extra_body={"min_p": 0}).choices


@row("min_p")
@pytest.mark.xfail(raises=openai.BadRequestError, reason="the sampler has no min_p", strict=True)
def test_min_p_1_is_greedy(client: openai.OpenAI) -> None:
    narrow = complete(client, temperature=1, extra_body={"min_p": 1.0})
    assert narrow.choices[0].text == complete(client).choices[0].text


PENALTIES = [("repetition_penalty", 1.0, 1.5), ("presence_penalty", 0, 1.5), ("frequency_penalty", 0.0, 1.5)]


def _check_penalty(client: openai.OpenAI, name: str, neutral: float, value: float) -> None:
    assert complete(client, extra_body={name: neutral}).choices
    assert_refused(complete, client, name, value)
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, extra_body={name: -10})
    assert (caught.value.param, caught.value.code) == (name, "invalid_value")


@row("repetition_penalty")
def test_repetition_penalty_is_refused_by_name(client: openai.OpenAI) -> None:
    _check_penalty(client, *PENALTIES[0])


@row("presence_penalty")
def test_presence_penalty_is_refused_by_name(client: openai.OpenAI) -> None:
    _check_penalty(client, *PENALTIES[1])


@row("frequency_penalty")
def test_frequency_penalty_is_refused_by_name(client: openai.OpenAI) -> None:
    _check_penalty(client, *PENALTIES[2])


def _distinct(text: str) -> float:
    words = text.split()
    return len(set(words)) / len(words)


def _check_less_repetition(client: openai.OpenAI, name: str, value: float) -> None:
    plain = complete(client, "la la la la la", max_tokens=64).choices[0].text
    penalised = complete(client, "la la la la la", max_tokens=64, extra_body={name: value}).choices[0].text
    assert _distinct(penalised) > _distinct(plain)


@row("repetition_penalty")
@pytest.mark.xfail(raises=openai.BadRequestError, reason="the sampler has no penalties", strict=True)
def test_repetition_penalty(client: openai.OpenAI) -> None:
    _check_less_repetition(client, "repetition_penalty", 1.5)


@row("presence_penalty")
@pytest.mark.xfail(raises=openai.BadRequestError, reason="the sampler has no penalties", strict=True)
def test_presence_penalty(client: openai.OpenAI) -> None:
    _check_less_repetition(client, "presence_penalty", 1.5)


@row("frequency_penalty")
@pytest.mark.xfail(raises=openai.BadRequestError, reason="the sampler has no penalties", strict=True)
def test_frequency_penalty(client: openai.OpenAI) -> None:
    _check_less_repetition(client, "frequency_penalty", 1.5)


@row("logprobs (completions)")
def test_logprobs_of_completions_are_refused_by_name(client: openai.OpenAI) -> None:
    assert complete(client, extra_body={"logprobs": None}).choices[0].logprobs is None
    for value in (0, 1, 5):
        assert_refused(complete, client, "logprobs", value)


@row("logprobs (completions)")
@pytest.mark.xfail(raises=openai.BadRequestError, reason="the engine returns no logprobs", strict=True)
def test_logprobs_of_completions(client: openai.OpenAI) -> None:
    found = complete(client, logprobs=2).choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == 8
    assert all(len(top) == 2 for top in found.top_logprobs)


@row("logprobs and top_logprobs (chat)")
def test_logprobs_of_chats_are_refused_by_name(client: openai.OpenAI) -> None:
    assert chat(client, logprobs=False, extra_body={"top_logprobs": 0}).choices[0].logprobs is None
    assert_refused(chat, client, "logprobs", True)
    assert_refused(chat, client, "top_logprobs", 3)


@row("logprobs and top_logprobs (chat)")
@pytest.mark.xfail(raises=openai.BadRequestError, reason="the engine returns no logprobs", strict=True)
def test_logprobs_of_chats(client: openai.OpenAI) -> None:
    entries = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(entries) == 8
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 for entry in entries)


@row("response_format")
def test_response_formats_are_refused_by_name(client: openai.OpenAI) -> None:
    assert chat(client, response_format={"type": "text"}).choices
    assert_refused(chat, client, "response_format", {"type": "json_object"})
    schema = {"name": "x", "schema": {"type": "object"}}
    assert_refused(chat, client, "response_format", {"type": "json_schema", "json_schema": schema})


@row("response_format")
@pytest.mark.xfail(raises=openai.BadRequestError, reason="no constrained decoding", strict=True)
def test_a_json_object(client: openai.OpenAI) -> None:
    answer = chat(client, response_format={"type": "json_object"}, max_tokens=64)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@row("tools and tool_choice")
def test_tools_are_refused_where_the_template_has_no_place_for_them(client: openai.OpenAI) -> None:
    assert chat(client, extra_body={"tools": [], "tool_choice": "auto"}).choices
    assert_refused(chat, client, "tools", [TOOL])


@row("tools and tool_choice")
@pytest.mark.parametrize("stream", [True, False])
def test_tools_are_rendered_and_calls_read_back(stream: bool) -> None:
    written = [
        "Let me ",
        "see.\n<tool",
        '_call>\n{"name": "weather", "arguments": {"place": "Ulm"}}\n',
        "</tool_call>",
    ]

    async def script(request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        for index, text in enumerate(written):
            yield Delta(text, (index,), 0, FinishReason.STOP if index == 3 else None)

    router = RouterUnderTest(tokenizer=a_tokenizer("bytes", template=HERMES), max_model_len=4096)
    router.follow(script)
    options: Any = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto"}
    with scripted_server(router) as server, client_of(server) as client:
        if stream:
            with client.chat.completions.stream(**options) as events:
                answer: Any = events.get_final_completion()
        else:
            answer = client.chat.completions.create(**options)
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(**{**options, "tool_choice": choice})
            assert (caught.value.param, caught.value.code) == ("tool_choice", "unsupported_parameter")
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me see."
    assert json.loads(message.tool_calls[0].function.arguments) == {"place": "Ulm"}
    prompt = router.tokenizer.decode(list(router.calls.requests[0][1].token_ids))
    assert '"name": "weather"' in prompt


@row("echo, suffix, best_of")
@pytest.mark.parametrize(("name", "value"), [("echo", True), ("suffix", "x"), ("best_of", 2)])
def test_old_fields_are_refused_by_name(client: openai.OpenAI, name: str, value: Any) -> None:
    assert_refused(complete, client, name, value)


@row("logit_bias")
def test_logit_bias_is_refused_by_name(client: openai.OpenAI) -> None:
    assert chat(client, logit_bias={}).choices
    assert_refused(chat, client, "logit_bias", {"50": 10})


@row("logit_bias")
@pytest.mark.xfail(raises=openai.BadRequestError, reason="the sampler has no logit_bias", strict=True)
def test_logit_bias_decides(server: HttpServer, client: openai.OpenAI) -> None:
    answer = complete(client, [5] * 20, max_tokens=4, logit_bias={"50": 100})
    only = httpx.post(f"{server.url}/detokenize", json={"tokens": [50] * 4}).json()["prompt"]
    assert answer.choices[0].text == only


@row("structured_outputs")
def test_structured_outputs_are_refused_by_name(client: openai.OpenAI) -> None:
    assert_refused(chat, client, "structured_outputs", {"regex": "a+"})
    assert_refused(chat, client, "guided_json", {"type": "object"})


@row("priority")
def test_priority_is_refused_by_name(client: openai.OpenAI) -> None:
    assert chat(client, extra_body={"priority": 0}).choices
    assert_refused(chat, client, "priority", 1)


# --- failures ---------------------------------------------------------------------------------------


@row("one error object on every path")
@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", "/nope", b"", 404),
        ("GET", "/v1/completions", b"", 405),
        ("DELETE", "/v1/models", b"", 405),
        ("GET", "/v1/models/nope", b"", 404),
        ("POST", "/v1/completions", b"", 400),
        ("POST", "/v1/chat/completions", b"{}", 400),
        ("POST", "/tokenize", b"{}", 400),
        ("POST", "/detokenize", b"nonsense", 400),
    ],
)
def test_every_error_has_the_one_shape(
    server: HttpServer, method: str, path: str, content: bytes, status: int
) -> None:
    answer = httpx.request(method, server.url + path, content=content, timeout=10)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert_error(answer.json(), param=error["param"], code=error["code"])


@row("400 malformed JSON, deep nesting, bad UTF-8")
@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b'{"model": NaN}', b'{"a": "\xff"}', b'{"a": "\\ud800"}', b"[" * 100_000, b'{"a":' * 1000],
)
def test_what_is_not_json_is_a_400(server: HttpServer, content: bytes) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=content, timeout=10)
    assert answer.status_code == 400
    assert_error(answer.json(), param=None, code="malformed_json")


@row("404 unknown model")
@pytest.mark.parametrize("ask", [chat, complete])
def test_an_unknown_model(client: openai.OpenAI, ask: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="gpt-9")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


@row("401 bad key")
@pytest.mark.xfail(reason="there are no API keys yet: write this test when there are", strict=True)
def test_a_bad_key_is_a_401() -> None:
    assert any("key" in field.name for field in dataclasses.fields(RouterConfig))


@row("413 body too large")
def test_a_body_above_the_limit(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        complete(client, "x" * (5 << 20))
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")


@row("429 and 503 with Retry-After")
def test_busy_is_a_429_that_the_client_retries() -> None:
    asked: list[ReplicaId] = []

    async def busy_at_first(request: GenerateRequest, replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        asked.append(replica)
        if len(asked) <= 2:  # both replicas
            raise QueueFull(1, 1)
        async for delta in counting(request, replica):
            yield delta

    router = RouterUnderTest()
    router.follow(busy_at_first)
    with scripted_server(router) as server:
        with client_of(server) as impatient, pytest.raises(openai.RateLimitError) as caught:
            complete(impatient)
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.code == "server_busy"
        asked.clear()
        with client_of(server, max_retries=1) as patient:
            assert complete(patient).choices[0].text
        assert len(asked) == 3


@row("429 and 503 with Retry-After")
def test_no_replica_is_a_503() -> None:
    router = RouterUnderTest(num_replicas=0)
    with scripted_server(router) as server, client_of(server) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            complete(client)
        assert (caught.value.status_code, caught.value.code) == (503, "no_replica")
        assert caught.value.response.headers["retry-after"] == "1"


@row("504 deadline")
def test_a_deadline_that_has_passed_is_a_504() -> None:
    """Passed before a replica was asked: the engine never hears of it."""
    with (
        scripted_server(RouterUnderTest(request_timeout_s=1e-9)) as server,
        client_of(server) as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        complete(client)
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")


@row("499 client gone")
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_generation(server: HttpServer, stream: bool) -> None:
    """Its connection is closed during a long answer; the engine is idle soon after."""
    before = metric(server, "warmpath_requests_total")
    body = {"model": MODEL, "prompt": "The sea", "max_tokens": 8000, "ignore_eos": True, "stream": stream}
    with socket.create_connection(("127.0.0.1", server.port), 10) as link:
        link.sendall(raw_post("/v1/completions", json.dumps(body).encode()))
        wait_for(lambda: metric(server, "warmpath_requests_in_flight") == 1)
        if stream:
            assert link.recv(1)
    wait_for(lambda: metric(server, "warmpath_requests_in_flight") == 0)
    wait_for(lambda: metric(server, "warmpath_requests_total") == before + 1)
    wait_for(lambda: num_running(server) == 0)


def num_running(server: HttpServer) -> int:
    replicas = httpx.get(f"{server.url}/version", timeout=10).json()["replicas"]
    return sum(int(replica["num_running"]) for replica in replicas)


def raw_post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


def wait_for(condition: Any, limit_s: float = 15.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


# --- the table --------------------------------------------------------------------------------------


def test_every_row_has_a_test() -> None:
    tests = [value for name, value in globals().items() if name.startswith("test_")]
    held = {item for test in tests for item in getattr(test, "conformance_rows", ())}
    assert set(ROWS) == held
    assert all(inspect.isfunction(test) for test in tests)
