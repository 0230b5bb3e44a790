"""The HTTP surface, through ASGI: bytes of streams, headers, errors, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import pytest

from cache.errors import DeadlineExceeded, ForwardFailed, QueueFull
from cache.errors import PromptTooLong as ReplicaPromptTooLong
from cache.messages import Delta, FinishReason, GenerateRequest
from cache.types import ReplicaId
from router.errors import ReplicaLost
from router.limits import Limits
from router.openai_api.service import Readiness
from router.openai_api.streams import BrokenStream
from tests.fakes_http import MAX_MODEL_LEN, MODEL, RouterUnderTest, events_of, text_of

SECRET = "a secret prompt"


@pytest.fixture
async def router() -> AsyncIterator[RouterUnderTest]:
    async with RouterUnderTest() as under_test:
        yield under_test


def _scripted(router: RouterUnderTest, *deltas: Delta | Exception, then_hang: bool = False) -> None:
    async def script(_request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        for delta in deltas:
            if isinstance(delta, Exception):
                raise delta
            yield delta
        if then_hang:
            await asyncio.Event().wait()

    router.calls.scripts = dict.fromkeys(router.replicas, script)


def _error(answer: httpx.Response) -> dict[str, Any]:
    """The error object, in the one shape there is."""
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


# --- whole answers ----------------------------------------------------------------------------------


async def test_a_chat_is_answered_whole(router: RouterUnderTest) -> None:
    body = (await router.chat()).json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "t0 t1 t2 t3 t4 ",
        "refusal": None,
    }
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": len("user:hello\nassistant:"),
        "completion_tokens": 5,
        "total_tokens": len("user:hello\nassistant:") + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_prompts_of_a_batch_keep_their_index_and_add_up(router: RouterUnderTest) -> None:
    body = (await router.complete(["ab", "c", [1, 2, 3]])).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["text"] for choice in body["choices"]} == {"t0 t1 t2 t3 t4 "}
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 15
    assert len({request.request_id for _, request in router.calls.requests}) == 3


async def test_cached_tokens_are_the_engines_count(router: RouterUnderTest) -> None:
    _scripted(router, Delta("a", (1,), 4), Delta("b", (2,), 0, FinishReason.STOP))
    usage = (await router.complete("0123456789")).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_sampling_reaches_the_replica(router: RouterUnderTest) -> None:
    await router.chat(
        temperature=0, top_p=0.5, top_k=-1, seed=-3, stop=["x"], stop_token_ids=[7], min_tokens=2,
        ignore_eos=True, cache_salt="s",
    )  # fmt: skip
    _, request = router.calls.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 0)
    assert (sampling.stop, sampling.stop_token_ids) == (("x",), (7,))
    assert (sampling.min_tokens, sampling.max_tokens, sampling.ignore_eos) == (2, 5, True)
    assert (request.seed, request.cache_salt) == (-3, "s")


async def test_another_salt_shares_no_block(router: RouterUnderTest) -> None:
    prompt = "0123456789abcdef"
    for salt in (None, "a", "b"):
        await router.complete(prompt, cache_salt=salt)
    hashes = [set(request.block_hashes) for _, request in router.calls.requests]
    assert len(hashes[0]) == 4
    assert len(set().union(*hashes)) == 12


async def test_without_a_seed_one_is_drawn(router: RouterUnderTest) -> None:
    for _ in range(2):
        await router.chat()
    seeds = [request.seed for _, request in router.calls.requests]
    assert seeds[0] != seeds[1]


async def test_a_chat_without_limit_gets_what_the_context_leaves(router: RouterUnderTest) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    answer = await router.client.post("/v1/chat/completions", json=body)
    assert answer.json()["usage"]["total_tokens"] == MAX_MODEL_LEN


# --- streams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_a_stream_has_one_finish_reason_then_done_and_nothing_after(
    router: RouterUnderTest, path: str
) -> None:
    answer = await getattr(router, path)(stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events_of(answer.content)
    assert last == "[DONE]"
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
    assert len({json.loads(chunk)["id"] for chunk in chunks}) == 1
    assert "usage" not in json.loads(chunks[0])


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_streaming_equals_not_streaming(router: RouterUnderTest, path: str) -> None:
    whole = (await getattr(router, path)("x")).json()
    streamed = await getattr(router, path)("x", stream=True, stream_options={"include_usage": True})
    chunks = [json.loads(event) for event in events_of(streamed.content)[:-1]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    texts = [
        choice.get("text") or choice["delta"].get("content", "")
        for chunk in chunks
        for choice in chunk["choices"]
    ]
    whole_choice = whole["choices"][0]
    assert "".join(texts) == (whole_choice.get("text") or whole_choice["message"]["content"])


async def test_the_role_comes_with_the_first_content_and_only_there(router: RouterUnderTest) -> None:
    _scripted(
        router,
        Delta("", (1,), 0),  # half a character: a token, no text
        Delta("ü", (2,), 0),
        Delta("b", (3,), 0),
        Delta("", (4,), 0, FinishReason.STOP),
    )
    answer = await router.chat(stream=True)
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events_of(answer.content)[:-1]]
    assert deltas == [{"role": "assistant", "content": "ü"}, {"content": "b"}, {}]


async def test_an_empty_answer_still_has_role_and_finish_reason(router: RouterUnderTest) -> None:
    _scripted(router, Delta("", (4,), 0, FinishReason.STOP))
    answer = await router.chat(stream=True)
    (choice,) = json.loads(events_of(answer.content)[0])["choices"]
    assert choice["delta"] == {"role": "assistant", "content": ""}
    assert choice["finish_reason"] == "stop"


async def test_continuous_usage_counts_up(router: RouterUnderTest) -> None:
    answer = await router.complete(stream=True, stream_options={"continuous_usage_stats": True})
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events_of(answer.content)[:-1]]
    assert counts == [2, 4, 5]


async def test_text_with_line_breaks_stays_one_event(router: RouterUnderTest) -> None:
    text = "a\n\nb\r\n\u2028data: [DONE]\n\n"
    _scripted(router, Delta(text, (1,), 0, FinishReason.STOP))
    events = events_of((await router.complete(stream=True)).content)
    assert len(events) == 2
    assert json.loads(events[0])["choices"][0]["text"] == text


async def test_a_streamed_batch_finishes_each_choice_once(router: RouterUnderTest) -> None:
    answer = await router.complete(["a", "b", "c"], stream=True)
    choices = [json.loads(event)["choices"][0] for event in events_of(answer.content)[:-1]]
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "t0 t1 t2 t3 t4 "
        assert [choice["finish_reason"] for choice in mine] == [None, None, "length"]


# --- failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (QueueFull(1, 1), 429, "rate_limit_error", "server_busy"),
        (ReplicaLost("gone"), 500, "server_error", "too_many_deaths"),
        (ForwardFailed(SECRET), 500, "server_error", "forward_failed"),
        (DeadlineExceeded(1, 2), 504, "timeout_error", "deadline_exceeded"),
        (ReplicaPromptTooLong(300, 200), 400, "invalid_request_error", "context_length_exceeded"),
        (ValueError(SECRET), 500, "server_error", "internal_error"),
    ],
)
async def test_a_failure_before_the_first_token_has_a_status_code(
    router: RouterUnderTest, error: Exception, status: int, kind: str, code: str, stream: bool
) -> None:
    _scripted(router, error)
    answer = await router.chat(stream=stream)
    assert answer.status_code == status
    assert (_error(answer)["type"], _error(answer)["code"]) == (kind, code)
    assert SECRET not in answer.text
    assert ("retry-after" in answer.headers) is (status == 429)


async def _call(
    router: RouterUnderTest, path: str, body: dict[str, Any], disconnect: asyncio.Event
) -> list[Any]:
    """The application called as a server does it; the messages sent, and what was raised, last."""
    sent: list[Any] = []
    content = [json.dumps(body).encode()]

    async def receive() -> dict[str, Any]:
        if content:
            return {"type": "http.request", "body": content.pop(), "more_body": False}
        await disconnect.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        await asyncio.sleep(0)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "headers": [],
        "server": ("router", 80), "client": ("client", 1),
    }  # fmt: skip
    try:
        await router.api(scope, receive, send)
    except Exception as error:
        sent.append(error)
    return sent


async def test_a_stream_that_fails_ends_in_an_error_event_and_a_cut_connection(
    router: RouterUnderTest,
) -> None:
    """Never a clean end: clients would take what they have for the whole answer."""
    _scripted(router, Delta("a", (1,), 0), ForwardFailed(SECRET))
    body = {"model": MODEL, "prompt": "x", "stream": True}
    sent = await _call(router, "/v1/completions", body, asyncio.Event())
    assert isinstance(sent[-1], BrokenStream)
    *_, last = [message for message in sent if isinstance(message, dict)]
    assert last["more_body"] is True
    error = json.loads(events_of(last["body"])[0])["error"]
    assert error["code"] == "forward_failed"
    assert SECRET not in str(sent)
    assert router.metric("warmpath_requests_total", endpoint="completions", outcome="broken_stream") == 1


async def test_a_batch_of_which_one_fails_fails_and_cancels_the_others(router: RouterUnderTest) -> None:
    async def script(request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        if request.request_id.endswith("-1"):
            raise ValueError(SECRET)
        yield Delta("a", (1,), 0)
        await asyncio.Event().wait()

    router.calls.scripts = dict.fromkeys(router.replicas, script)
    answer = await router.complete(["a", "b", "c"])
    assert answer.status_code == 500
    assert router.calls.running == 0
    assert router.parts.routing.statistics().in_flight == 0


async def _until_hanging(router: RouterUnderTest, num_calls: int) -> None:
    """Enough turns of the loop for so many calls to start and for their deltas to be passed on."""
    for _ in range(200):
        await asyncio.sleep(0)
    assert router.calls.running == num_calls


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_deltas", [0, 1])
async def test_a_client_that_leaves_cancels_its_generations(
    router: RouterUnderTest, stream: bool, num_deltas: int, prompt: Any
) -> None:
    """Waiting for the first token, or after it; whole or streamed; alone or a batch."""
    _scripted(router, *[Delta(text_of(0), (1,), 0)] * num_deltas, then_hang=True)
    disconnect = asyncio.Event()
    body = {"model": MODEL, "prompt": prompt, "stream": stream}
    call = asyncio.create_task(_call(router, "/v1/completions", body, disconnect))
    num_prompts = 1 if isinstance(prompt, str) else len(prompt)
    await _until_hanging(router, num_prompts)
    disconnect.set()
    await asyncio.wait_for(call, 1)
    assert router.calls.running == 0
    assert router.calls.cancelled == num_prompts
    assert router.parts.routing.statistics().in_flight == 0
    assert router.metric("warmpath_requests_total", endpoint="completions", outcome="cancelled") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_handler_that_is_cancelled_cancels_its_generation(
    router: RouterUnderTest, stream: bool
) -> None:
    """What Serve does when a client leaves, besides telling us."""
    _scripted(router, Delta(text_of(0), (1,), 0), then_hang=True)
    body = {"model": MODEL, "prompt": "x", "stream": stream}
    call = asyncio.create_task(_call(router, "/v1/completions", body, asyncio.Event()))
    await _until_hanging(router, 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (router.calls.running, router.calls.cancelled) == (0, 1)
    assert router.metric("warmpath_requests_total", endpoint="completions", outcome="cancelled") == 1


# --- what is wrong with a request -------------------------------------------------------------------


async def _post(router: RouterUnderTest, content: bytes) -> httpx.Response:
    return await router.client.post("/v1/chat/completions", content=content)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": NaN}', b'{"a": "\xff"}', b"[" * 100_000])
async def test_malformed_json_is_a_400(router: RouterUnderTest, content: bytes) -> None:
    answer = await _post(router, content)
    assert answer.status_code == 400
    assert _error(answer)["code"] == "malformed_json"


async def test_a_body_above_the_limit_is_a_413() -> None:
    async with RouterUnderTest(limits=Limits(max_body_bytes=1024)) as router:
        answer = await _post(router, b" " * 1025)
        assert answer.status_code == 413
        assert _error(answer)["code"] == "body_too_large"


async def test_headers_above_the_limit_are_a_431(router: RouterUnderTest) -> None:
    answer = await router.client.get("/live", headers={"x-large": "x" * (16 << 10)})
    assert answer.status_code == 431
    assert _error(answer)["code"] == "headers_too_large"
    assert answer.headers["x-request-id"]
    assert (await router.client.get("/live", headers={"x-large": "x" * (8 << 10)})).status_code == 200


LIMITS = Limits(
    max_json_depth=6, max_messages=2, max_prompts=2, max_stop_strings=2, max_stop_chars=3, max_salt_chars=4
)
BEYOND: list[tuple[str, dict[str, Any], str | None]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 3}, "messages"),
    ("/v1/completions", {"prompt": ["x"] * 3}, "prompt"),
    ("/v1/completions", {"prompt": "x", "stop": ["x"] * 3}, "stop"),
    ("/v1/completions", {"prompt": "x", "stop": "xxxx"}, "stop"),
    ("/v1/completions", {"prompt": "x", "stop_token_ids": [1] * 3}, "stop_token_ids"),
    ("/v1/completions", {"prompt": "x", "cache_salt": "xxxxx"}, "cache_salt"),
    ("/v1/completions", {"prompt": "x", "metadata": [[[[[[[]]]]]]]}, None),
]


@pytest.mark.parametrize(("path", "body", "param"), BEYOND)
async def test_a_limit_that_was_lowered_holds(path: str, body: dict[str, Any], param: str | None) -> None:
    async with RouterUnderTest(limits=LIMITS) as router:
        answer = await router.client.post(path, json={"model": MODEL, "max_tokens": 1, **body})
        assert answer.status_code == 400
        assert _error(answer)["param"] == param
    async with RouterUnderTest() as router:
        answer = await router.client.post(path, json={"model": MODEL, "max_tokens": 1, **body})
        assert answer.status_code == 200, answer.text


async def test_an_unknown_model_is_a_404(router: RouterUnderTest) -> None:
    answer = await router.chat(model="other")
    assert answer.status_code == 404
    assert (_error(answer)["param"], _error(answer)["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(("prompt", "param"), [("x" * 300, "prompt"), (["a", "x" * 300], "prompt[1]")])
async def test_too_long_a_prompt_names_both_numbers(router: RouterUnderTest, prompt: Any, param: str) -> None:
    answer = await router.complete(prompt)
    assert answer.status_code == 400
    error = _error(answer)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "300 in the prompt" in error["message"]
    assert "200 tokens" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop_token_ids": [256]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 17}, "stop_token_ids"),
        ({"min_tokens": 6}, "min_tokens"),
        ({"n": 2}, "n"),
        ({"temperature": 3}, "temperature"),
    ],
)
async def test_a_field_out_of_range_is_named(
    router: RouterUnderTest, fields: dict[str, Any], param: str
) -> None:
    answer = await router.chat(SECRET, **fields)
    assert answer.status_code == 400
    assert _error(answer)["param"] == param
    assert SECRET not in answer.text


@pytest.mark.parametrize("prompt", [[256], [0, 1 << 20], "", [[1], [300]]])
async def test_token_ids_outside_the_vocabulary_and_empty_prompts_are_refused(
    router: RouterUnderTest, prompt: Any
) -> None:
    answer = await router.complete(prompt)
    assert answer.status_code == 400
    assert _error(answer)["param"].startswith("prompt")


async def test_unknown_fields_are_accepted_and_counted(router: RouterUnderTest) -> None:
    assert (await router.chat(frobnicate=1, user="u")).status_code == 200
    assert router.metric("warmpath_unknown_fields_total") == 1


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
    _error(answer)
    assert ("allow" in answer.headers) is (status == 405)


async def test_without_replicas_the_answer_is_503(router: RouterUnderTest) -> None:
    router.parts.routing.update_replicas({})
    answer = await router.chat()
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"


# --- headers and the other routes -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [("abc-1.2:3_X", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False), ("", False)],
)
async def test_the_request_id_is_echoed_if_it_is_harmless(
    router: RouterUnderTest, given: str, is_kept: bool
) -> None:
    answer = await router.client.get("/live", headers={"x-request-id": given.encode("latin-1")})  # type: ignore[dict-item]
    echoed = answer.headers.get_list("x-request-id")
    assert len(echoed) == 1
    assert (echoed == [given]) is is_kept
    assert echoed[0]


async def test_one_request_id_used_twice_at_once_is_two_requests(router: RouterUnderTest) -> None:
    headers = {"x-request-id": "same"}
    body = {"model": MODEL, "prompt": "x"}
    answers = await asyncio.gather(
        *(router.client.post("/v1/completions", json=body, headers=headers) for _ in range(3))
    )
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len({request.request_id for _, request in router.calls.requests}) == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_routing_headers_are_behind_a_switch(stream: bool) -> None:
    names = ("x-warmpath-replica", "x-warmpath-cached-tokens", "x-warmpath-overlap-blocks")
    async with RouterUnderTest() as silent:
        answer = await silent.chat(stream=stream)
        assert not any(name in answer.headers for name in names)
    async with RouterUnderTest(expose_routing=True) as open_router:
        first = await open_router.chat("x" * 40, stream=stream)
        second = await open_router.chat("x" * 40, stream=stream)
        assert first.headers[names[0]] == second.headers[names[0]] == open_router.calls.requests[0][0]
        assert first.headers[names[2]] == "0"
        assert int(second.headers[names[2]]) > 0


async def test_the_policy_header_counts_only_behind_the_switch() -> None:
    headers = {"x-warmpath-policy": "round_robin"}
    body = {"model": MODEL, "prompt": "0123456789"}
    async with RouterUnderTest(expose_routing=True) as router:
        for _ in range(4):
            await router.client.post("/v1/completions", json=body, headers=headers)
        visited = [replica_id for replica_id, _ in router.calls.requests]
        assert sorted(visited) == sorted(router.replicas * 2)
        answer = await router.client.post("/v1/completions", json=body, headers={"x-warmpath-policy": "?"})
        assert answer.status_code == 400
        assert _error(answer)["param"] == "x-warmpath-policy"
    async with RouterUnderTest() as router:
        answer = await router.client.post("/v1/completions", json=body, headers={"x-warmpath-policy": "?"})
        assert answer.status_code == 200


async def test_health_tells_why_not(router: RouterUnderTest) -> None:
    assert (await router.client.get("/health")).status_code == 200
    router.parts.service.readiness = lambda: Readiness("no replica is known", 0)
    answer = await router.client.get("/health")
    assert (answer.status_code, answer.json()["reason"]) == (503, "no replica is known")
    assert (await router.client.get("/live")).status_code == 200


async def test_models_name_the_context_length(router: RouterUnderTest) -> None:
    (card,) = (await router.client.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"]) == (MODEL, MAX_MODEL_LEN)
    assert (await router.client.get(f"/v1/models/{MODEL}")).json() == card


async def test_metrics_and_the_api_description_are_served(router: RouterUnderTest) -> None:
    await router.chat()
    text = (await router.client.get("/metrics")).text
    assert 'warmpath_requests_total{endpoint="chat/completions",outcome="ok"} 1.0' in text
    paths = (await router.client.get("/openapi.json")).json()["paths"]
    assert "temperature" in json.dumps(paths["/v1/chat/completions"]["post"]["requestBody"])


async def test_every_request_is_counted_once(router: RouterUnderTest) -> None:
    await router.chat()
    await router.chat(stream=True)
    await router.chat(n=2)
    await router.chat(model="x")
    counted = {
        outcome: router.metric("warmpath_requests_total", endpoint="chat/completions", outcome=outcome)
        for outcome in ("ok", "invalid", "not_found", "cancelled", "failed")
    }
    assert counted == {"ok": 2, "invalid": 1, "not_found": 1, "cancelled": 0, "failed": 0}


@pytest.mark.parametrize("binding", ["at_once", "late"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_batch_of_64_prompts_is_64_decisions(binding: str, stream: bool) -> None:
    """Each prompt goes where it is cached; none waits for another one's place."""
    async with RouterUnderTest(num_replicas=4, binding=binding) as router:
        prompts = [f"{index:02d} is a prompt" for index in range(64)]
        answer = await asyncio.wait_for(router.complete(prompts, stream=stream), 20)
        assert answer.status_code == 200, answer.text
        requests = [request for _, request in router.calls.requests]
        assert len({request.request_id for request in requests}) == 64
        assert sorted(bytes(list(request.token_ids)).decode() for request in requests) == prompts
        decided = sum(
            sample.value
            for metric in router.parts.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "warmpath_decisions_total"
        )
        assert decided == 64
        assert len({replica for replica, _ in router.calls.requests}) == 4
        assert router.parts.routing.statistics().in_flight == 0
        if not stream:
            assert [choice["index"] for choice in answer.json()["choices"]] == list(range(64))


@pytest.mark.parametrize("path", ["chat", "complete"])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_request_id_is_in_the_log_and_reaches_the_replica(
    caplog: pytest.LogCaptureFixture, path: str, stream: bool
) -> None:
    async with RouterUnderTest(log_requests=True) as router:
        router.client.headers["x-request-id"] = "mine-1"
        with caplog.at_level("INFO", logger="router"):
            await getattr(router, path)(SECRET, stream=stream)
    (line,) = [record for record in caplog.records if record.message == "request ended"]
    assert line.__dict__["request_id"] == "mine-1"
    assert line.__dict__["outcome"] == "ok"
    assert router.calls.requests[0][1].request_id.startswith("mine-1-")
    assert not any(SECRET in str(record.__dict__) for record in caplog.records)


async def test_a_failure_is_logged_with_its_request_id(
    router: RouterUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    _scripted(router, ValueError(SECRET))
    router.client.headers["x-request-id"] = "mine-2"
    await router.chat(SECRET)
    (line,) = [record for record in caplog.records if record.message == "request failed"]
    assert line.__dict__["request_id"] == "mine-2"
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"x-session-id": "s"}, {}),
        ({"x-session-affinity": "s"}, {}),
        ({}, {"prompt_cache_key": "s"}),
        ({"x-session-id": "s"}, {"prompt_cache_key": "other"}),
    ],
)
async def test_what_names_a_session_keeps_it_in_one_place(
    headers: dict[str, str], fields: dict[str, Any]
) -> None:
    visited = []
    for more in (headers, fields), ({}, {}):
        async with RouterUnderTest(num_replicas=8, policy="session_affinity") as router:
            for prompt in ("one", "two", "three", "four"):
                body = {"model": MODEL, "prompt": prompt, **more[1]}
                answer = await router.client.post("/v1/completions", json=body, headers=more[0])
                assert answer.status_code == 200, answer.text
            visited.append(len({replica for replica, _ in router.calls.requests}))
    with_session, without = visited
    assert with_session == 1 < without


async def test_the_cache_key_separates_nothing(router: RouterUnderTest) -> None:
    """It is a hint: the same prompt has the same blocks under every key."""
    for key in ("a", "b"):
        await router.complete("0123456789abcdef", prompt_cache_key=key)
    first, second = (request.block_hashes for _, request in router.calls.requests)
    assert first == second
