"""Answers that come whole: their objects, their usage, and what the replica was asked for."""

from __future__ import annotations

from cache.messages import Delta, FinishReason
from tests.fakes.http import MAX_MODEL_LEN, MODEL, RouterUnderTest


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


async def test_cached_tokens_are_the_engines_count(router: RouterUnderTest) -> None:
    router.answer_with(Delta("a", (1,), 4), Delta("b", (2,), 0, FinishReason.STOP))
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


async def test_the_cache_key_separates_nothing(router: RouterUnderTest) -> None:
    """It is a hint: the same prompt has the same blocks under every key."""
    for key in ("a", "b"):
        await router.complete("0123456789abcdef", prompt_cache_key=key)
    first, second = (request.block_hashes for _, request in router.calls.requests)
    assert first == second


async def test_without_a_seed_one_is_drawn(router: RouterUnderTest) -> None:
    for _ in range(2):
        await router.chat()
    seeds = [request.seed for _, request in router.calls.requests]
    assert seeds[0] != seeds[1]


async def test_a_chat_without_limit_gets_what_the_context_leaves(router: RouterUnderTest) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    answer = await router.client.post("/v1/chat/completions", json=body)
    assert answer.json()["usage"]["total_tokens"] == MAX_MODEL_LEN
