"""Tenants over HTTP: what their prompts are kept apart by, and whose turn it is where they share threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from cache.errors import QueueFull
from cache.fair_threads import FairThreads
from cache.messages import Delta, GenerateRequest
from cache.types import ReplicaId
from router.openai_api import structure_check
from router.openai_api.prompt_text import SaltedText
from router.prompts import prompt
from router.prompts.prompt import OFFLOAD_CHARS
from tests.fakes.guarded import PROMPT, ask, key, settings
from tests.fakes.http import MODEL, RouterUnderTest


async def salts_of(router: RouterUnderTest, *asked: tuple[str, dict[str, Any]]) -> list[str]:
    for name, fields in asked:
        assert (await ask(router, name, **fields)).status_code == 200
    return [request.cache_salt for _, request in router.calls.requests]


async def test_tenants_have_a_salt_each_that_reaches_engine_and_index(guarded: RouterUnderTest) -> None:
    own = {"cache_salt": "own"}
    alice, anna, bob, alices, bobs = await salts_of(
        guarded, ("alice", {}), ("anna", {}), ("bob", {}), ("alice", own), ("bob", own)
    )
    assert alice == anna
    assert len({alice, bob, alices, bobs}) == 4
    sent = [request for _, request in guarded.calls.requests]
    assert all(len(request.block_hashes) == len(PROMPT) // 4 for request in sent)
    hashes = {tuple(request.block_hashes) for request in sent}
    assert len(hashes) == 4
    assert not set.intersection(*(set(each) for each in hashes))
    hasher = guarded.parts.dispatcher.hasher
    for request in sent:  # as an engine derives them
        root = hasher.root(salt=request.cache_salt)
        assert list(request.block_hashes) == hasher.chain(root, request.token_ids)


async def test_every_attempt_at_a_request_has_its_salt(tmp_path: Path) -> None:
    """Else nothing of what one replica had computed would be found by the next."""

    async def dying(_request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        raise QueueFull(1, 1)
        yield

    async with RouterUnderTest(tenants=settings(tmp_path, cache_scope="request")) as router:
        router.calls.scripts = {router.replicas[0]: dying}
        for _ in range(8):
            assert (await ask(router, "alice", ["a", "b"])).status_code == 200
        salts: dict[str, set[str]] = {}
        for _, request in router.calls.requests:
            salts.setdefault(str(request.request_id)[:32], set()).add(request.cache_salt)
        assert len(router.calls.requests) > 16
        assert [len(each) for each in salts.values()] == [1] * 8
        assert len(set.union(*salts.values())) == 8


async def test_shared_caches_with_keys(tmp_path: Path) -> None:
    async with RouterUnderTest(tenants=settings(tmp_path, cache_scope="shared")) as router:
        salts = await salts_of(router, ("alice", {}), ("bob", {}), ("bob", {"cache_salt": "x"}))
        assert salts == ["", "", "x"]


async def test_what_was_tokenized_for_one_tenant_is_not_looked_up_for_another(
    guarded: RouterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []
    encoder = guarded.parts.service._encoder
    for name in ("encode_text", "encode_chat"):
        original = getattr(encoder, name)

        async def noting(*arguments: Any, original: Any = original, **options: Any) -> Any:
            given.append(options["salt"])
            return await original(*arguments, **options)

        monkeypatch.setattr(encoder, name, noting)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for name in ("alice", "bob"):
        await ask(guarded, name)
        await guarded.client.post("/v1/chat/completions", json=chat, headers=key(name))
        for body in ({"prompt": "x"}, {"messages": chat["messages"]}):
            answer = await guarded.client.post("/tokenize", json=body, headers=key(name))
            assert answer.status_code == 200
    assert len(given) == 8
    assert len(set(given[:4])) == len(set(given[4:])) == 1
    assert given[0] != given[4]
    assert "" not in given


LONG = "x" * (OFFLOAD_CHARS + 1)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": MODEL, "prompt": LONG}),
        ("/v1/completions", {"model": MODEL, "prompt": [1] * (OFFLOAD_CHARS * 8 + 8)}),
        ("/v1/completions", {"model": MODEL, "prompt": "x", "guided_json": SCHEMA}),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": LONG}]}),
        ("/v1/prefixes", {"model": MODEL, "prompt": LONG}),
        ("/v1/prefixes", {"model": MODEL, "prompt": [1] * (OFFLOAD_CHARS * 8 + 8)}),
        ("/v1/prefixes", {"model": MODEL, "messages": [{"role": "user", "content": LONG}]}),
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
        ("/detokenize", {"tokens": [1] * (OFFLOAD_CHARS + 1)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
async def test_who_sends_much_to_a_thread_delays_another_tenant_by_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Alice and Anna are one tenant, and take their turns together."""
    for module in (prompt, structure_check):
        monkeypatch.setattr(module, "NUM_THREADS", 1)
    gate, order, num_pending = threading.Event(), list[str](), asyncio.Semaphore(0)
    submit = FairThreads.submit

    def noting(threads: FairThreads, tenant: str, job: Callable[[], Any]) -> Future[Any]:
        def noted() -> Any:
            order.append(tenant)
            assert gate.wait(20)
            return job()

        num_pending.release()
        return submit(threads, tenant, noted)

    monkeypatch.setattr(FairThreads, "submit", noting)
    async with RouterUnderTest(tenants=settings(tmp_path)) as router:
        answers = []
        for number, name in enumerate(("alice", "anna", "alice", "anna", "bob", "bob")):
            # What a tenant has asked for is not tried again.
            own = {"guided_json": {**SCHEMA, "title": str(number)}} if "guided_json" in body else {}
            ask = router.client.post(path, json=body | own, headers=key(name))
            answers.append(asyncio.create_task(ask))
            await num_pending.acquire()
        gate.set()
        async with asyncio.timeout(20):
            while len(order) < len(answers):  # noqa: ASYNC110  # threads have no event here
                await asyncio.sleep(0.001)
        for answer in answers:  # these replicas hold no prefix
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
    assert order[:6] == ["acme", "acme", "bob", "acme", "bob", "acme"]


async def test_policies_that_place_by_text_or_session_meet_one_tenants_alone(
    guarded: RouterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    start = guarded.parts.dispatcher.start
    monkeypatch.setattr(guarded.parts.dispatcher, "start", lambda job: seen.append(job.text) or start(job))
    for name in ("alice", "anna", "bob"):
        await ask(guarded, name, prompt_cache_key="session")
    assert all(isinstance(view, SaltedText) for view in seen)
    for read in (lambda view: view.text, lambda view: view.first_user_text, lambda view: view.session):
        alice, anna, bob = map(read, seen)
        assert alice == anna != bob
        assert alice.endswith(("session", PROMPT))
