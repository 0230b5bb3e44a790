"""`/v1/prefixes` over HTTP: whose a prefix is, how many a key may hold, and whose cache it warms."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cache.messages import Delta, FinishReason, GenerateRequest
from cache.types import PinId, ReplicaId
from router.limits import Limits
from router.prefixes.kept_report import encode_kept
from router.prefixes.prefix import PinnedPrefix
from router.prefixes.tombstones import GivenBack
from router.tenants.key_table import ApiKey, parse_keys
from router.tenants.settings import TenantSettings
from tests.fakes.holding import HoldingReplicas
from tests.fakes.http import BLOCK_SIZE, MODEL, RouterUnderTest, error_of
from tests.fakes.keys import entry, key_file
from tests.fakes.tokenizers import CHATML, a_tokenizer

ENTRIES = [
    entry("alice", tenant="acme"),
    entry("anna", tenant="acme"),
    entry("bob"),
    entry("one", limits={"prefixes": 1}),
    entry("none", limits={"prefixes": 0}),
    entry("small", limits={"prefix_tokens": 40}),
    entry("thrifty", limits={"tokens_per_minute": 100}),
    entry("heavy", share=3),
    entry("batch", priority=4),
    entry("front", priority=-2),
]
PROMPT = [*range(5 * BLOCK_SIZE), 1, 2]  # five blocks, and two tokens more


@contextlib.asynccontextmanager
async def holding(
    max_pinned: int = 100, **config: Any
) -> AsyncIterator[tuple[RouterUnderTest, HoldingReplicas]]:
    async with RouterUnderTest(**config) as router:
        yield router, HoldingReplicas(router, max_pinned)


def with_keys(folder: Path, **changes: Any) -> TenantSettings:
    (folder / "keys.yaml").write_text(key_file(*ENTRIES))
    (folder / "secret").write_text("0123456789abcdef" * 2)
    return TenantSettings(keys_file=str(folder / "keys.yaml"), secret_file=str(folder / "secret"), **changes)


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key of {name}"}


async def hold(router: RouterUnderTest, name: str = "", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": PROMPT, "seconds": 60, **fields}
    return await router.client.post("/v1/prefixes", json=body, headers=key(name) if name else {})


async def ids_of(router: RouterUnderTest, name: str) -> list[str]:
    answer = await router.client.get("/v1/prefixes", headers=key(name))
    return [each["id"] for each in answer.json()["data"]]


async def test_a_key_sees_and_deletes_its_own(tmp_path: Path) -> None:
    """Not even those of the same tenant: who shares a cache need not share what is held in it."""
    async with holding(tenants=with_keys(tmp_path)) as (router, replicas):
        held = (await hold(router, "alice", copies=2)).json()
        for name in ("anna", "bob"):
            assert await ids_of(router, name) == []
            for ask in (router.client.get, router.client.delete):
                answer = await ask(f"/v1/prefixes/{held['id']}", headers=key(name))
                assert answer.status_code == 404
                assert error_of(answer)["code"] == "prefix_not_found"
        assert len(replicas.pins) == 2
        assert await ids_of(router, "alice") == [held["id"]]
        answer = await router.client.delete(f"/v1/prefixes/{held['id']}", headers=key("alice"))
        assert answer.json()["deleted"] is True
        assert replicas.pins == {}


async def test_a_removed_keys_end_and_a_replaced_ones_do_not(tmp_path: Path) -> None:
    """Nobody could give them back: the key is not accepted, and others do not see them."""
    async with holding(tenants=with_keys(tmp_path)) as (router, replicas):
        for name in ("alice", "anna", "bob"):
            assert (await hold(router, name)).status_code == 200
        gate = router.parts.tenancy.gate
        assert gate is not None
        others = [each for each in ENTRIES if each["name"] not in ("alice", "bob")]
        gate._ring.table = parse_keys(key_file(entry("bob", key="another"), *others))
        router.parts.prefixes.look()
        for _ in range(50):
            await asyncio.sleep(0)
        owners = {pin.owner for pin in replicas.pins.values()}
        assert owners == {ApiKey("anna", "acme").owner, ApiKey("bob", "bob").owner}


async def test_without_keys_they_are_nobodys_and_stay() -> None:
    async with holding() as (router, replicas):
        assert (await hold(router)).status_code == 200
        router.parts.prefixes.look()
        for _ in range(50):
            await asyncio.sleep(0)
        assert [pin.owner for pin in replicas.pins.values()] == [""]


@pytest.mark.parametrize("adds", [None, True, False])
async def test_a_text_is_held_as_completions_with_the_same_fields_begin(adds: bool | None) -> None:
    """`add_special_tokens: false` was overlooked: what was held began with a token that no prompt had."""
    tokenizer = a_tokenizer("wordpiece")
    async with holding(tokenizer=tokenizer) as (router, _replicas):
        fields: dict[str, Any] = {"prompt": "hello word " * 20, "add_special_tokens": adds}
        held = (await hold(router, **fields)).json()
        assert held["status"] == "held"
        prefix = list(router.calls.requests[-1][1].token_ids)
        ids = (await router.client.post("/tokenize", json=fields)).json()["tokens"]
        assert prefix == ids[: len(prefix)]


async def test_a_held_prefix_has_the_variables_of_a_chat() -> None:
    """Its text is one that the variable decides on."""
    tokenizer = a_tokenizer("bytes", template="{{ date }}" + CHATML)
    messages = [{"role": "user", "content": "hello"}]
    async with holding(tokenizer=tokenizer) as (router, _replicas):
        fields: dict[str, Any] = {"messages": messages, "chat_template_kwargs": {"date": "1 May 2030, noon"}}
        held = await hold(router, prompt=None, **fields)
        assert held.status_code == 200, held.text
        prefix = list(router.calls.requests[-1][1].token_ids)
        ids = (await router.client.post("/tokenize", json=fields)).json()["tokens"]
        assert prefix == ids[: len(prefix)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template", "x"),
        ("chat_template_kwargs", {"messages": []}),
        ("continue_final_message", True),
        ("add_special_tokens", True),
        ("add_special_tokens", "no"),
    ],
)
async def test_what_would_render_a_chat_otherwise_is_refused(field: str, value: Any) -> None:
    async with holding() as (router, replicas):
        messages = [{"role": "system", "content": "Be brief, and kind to sailors."}]
        answer = await hold(router, prompt=None, messages=messages, **{field: value})
        assert (answer.status_code, error_of(answer)["param"].partition(".")[0]) == (400, field)
        assert replicas.pins == {}


async def test_nothing_is_open_without_a_key(tmp_path: Path) -> None:
    async with holding(tenants=with_keys(tmp_path)) as (router, _):
        for method, path in (("POST", ""), ("GET", ""), ("GET", "/prefix-1"), ("DELETE", "/prefix-1")):
            assert (await router.client.request(method, f"/v1/prefixes{path}")).status_code == 401


async def test_its_salt_is_that_of_the_keys_requests(tmp_path: Path) -> None:
    async with holding(tenants=with_keys(tmp_path)) as (router, replicas):
        for name in ("alice", "anna", "bob"):
            assert (await hold(router, name)).status_code == 200
        alice, anna, bob = replicas.salts
        assert alice == anna != bob
        assert alice == router.parts.tenancy.salts.salt("acme", None)


async def test_its_turn_is_that_of_the_keys_requests(tmp_path: Path) -> None:
    """It was nobody's: what a tenant has had, and what its share is, did not count for its prefixes."""
    async with holding(tenants=with_keys(tmp_path)) as (router, _):
        for name in ("alice", "heavy", "batch", "front"):
            assert (await hold(router, name)).status_code == 200
        turns = [(each.tenant, each.share, each.priority) for _, each in router.calls.requests]
    assert turns == [("acme", 1.0, 0), ("heavy", 3.0, 0), ("batch", 1.0, 4), ("front", 1.0, 0)]


async def test_names_of_keys_go_nowhere(tmp_path: Path) -> None:
    async with holding(tenants=with_keys(tmp_path)) as (router, replicas):
        await hold(router, "alice")
        (pin,) = replicas.pins.values()
        assert pin.owner == ApiKey("alice", "acme").owner != ApiKey("anna", "acme").owner
        assert "alice" not in pin.owner


@pytest.mark.parametrize(
    ("name", "fields", "numbers"),
    [
        ("none", {}, ("1 prefixes", "limit of 0", "0 are left")),
        ("small", {"copies": 2}, ("40 tokens", "limit of 40", "20 are left")),
    ],
)
async def test_a_key_holds_no_more_than_it_may(
    tmp_path: Path, name: str, fields: dict[str, Any], numbers: tuple[str, ...]
) -> None:
    async with holding(tenants=with_keys(tmp_path)) as (router, replicas):
        if name == "small":
            assert (await hold(router, name)).status_code == 200
        before = len(replicas.pins)
        answer = await hold(router, name, **fields)
        assert (answer.status_code, error_of(answer)["code"]) == (400, "prefix_limit_reached")
        assert all(number in error_of(answer)["message"] for number in numbers)
        assert len(replicas.pins) == before


async def test_room_in_a_keys_limit_comes_back(tmp_path: Path) -> None:
    """And counts from the moment it is asked for: two at once are not both let in."""
    async with holding(tenants=with_keys(tmp_path)) as (router, _):
        answers = await asyncio.gather(hold(router, "one"), hold(router, "one"))
        assert sorted(answer.status_code for answer in answers) == [200, 400]
        (held,) = await ids_of(router, "one")
        await router.client.delete(f"/v1/prefixes/{held}", headers=key("one"))
        assert (await hold(router, "one")).status_code == 200


async def test_without_keys_the_limits_are_everybodys() -> None:
    async with holding(limits=Limits(max_prefixes=2, max_prefix_tokens=50)) as (router, _):
        assert (await hold(router)).status_code == 200
        assert error_of(await hold(router, copies=2))["code"] == "prefix_limit_reached"
        assert (await hold(router)).status_code == 200
        assert error_of(await hold(router, prompt=PROMPT[:8]))["code"] == "prefix_limit_reached"


async def test_so_many_copies_and_no_more() -> None:
    async with holding(limits=Limits(max_prefix_copies=1)) as (router, _):
        assert (await hold(router)).status_code == 200
        for copies in 2, 10**30:
            answer = await hold(router, copies=copies)
            assert (answer.status_code, error_of(answer)["param"]) == (400, "copies")
            assert "at most 1." in error_of(answer)["message"]


async def test_what_it_computes_counts_and_what_fails_does_not(tmp_path: Path) -> None:
    async with holding(tenants=with_keys(tmp_path), max_pinned=8) as (router, _):
        answer = await hold(router, "thrifty", prompt=[7] * 9 * BLOCK_SIZE)
        assert error_of(answer)["code"] == "prefix_does_not_fit"
        answer = await hold(router, "thrifty", copies=2)
        assert answer.headers["x-ratelimit-remaining-tokens"] == "60"
        assert (await hold(router, "thrifty", prompt=[3] * 64, copies=2)).status_code == 429


async def test_a_salt_drawn_for_one_request_would_warm_nothing(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef" * 2)
    tenants = TenantSettings(cache_scope="request", secret_file=str(tmp_path / "secret"))
    async with holding(tenants=tenants) as (router, _):
        answer = await hold(router)
        assert (error_of(answer)["param"], answer.status_code) == ("cache_salt", 400)
        assert (await hold(router, cache_salt="mine")).status_code == 200


async def test_messages_are_held_up_to_where_more_would_follow() -> None:
    """Whole blocks of the messages alone: neither the assistant's turn nor half a block."""
    async with holding(max_model_len=1000) as (router, replicas):
        messages = [{"role": "system", "content": "abc" * 9}]
        answer = (await hold(router, prompt=None, messages=messages)).json()
        shared = len("system:" + "abc" * 9 + "\n")
        assert answer["prompt_tokens"] == shared
        assert answer["tokens"] == shared // BLOCK_SIZE * BLOCK_SIZE
        (request,) = [request for _, request in router.calls.requests]
        assert bytes(list(request.token_ids)) == ("system:" + "abc" * 9 + "\n").encode()[: answer["tokens"]]
        assert len(replicas.pins) == 1


async def test_unknown_fields_are_counted() -> None:
    async with holding() as (router, _):
        assert (await hold(router, surprise=1)).status_code == 200
        assert router.metric("warmpath_unknown_fields_total") == 1
        assert router.metric("warmpath_requests_total", endpoint="prefixes", outcome="ok") == 1
        assert router.metric("warmpath_prefix_copies_made_total") == 1


@pytest.mark.parametrize("deletes", [True, False])
async def test_who_ends_a_prefix_that_is_being_computed_is_charged(tmp_path: Path, deletes: bool) -> None:
    """It was given back, so that its blocks were warm for nothing."""
    async with holding(tenants=with_keys(tmp_path)) as (router, _):
        began, goes_on = asyncio.Event(), asyncio.Event()

        async def computing(_request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
            began.set()
            await goes_on.wait()
            yield Delta("", (), 0, FinishReason.LENGTH)

        router.follow(computing)
        asking = asyncio.create_task(hold(router, "thrifty", prompt=[3] * 64))
        await asyncio.wait_for(began.wait(), 20)
        if deletes:
            [prefix_id] = await ids_of(router, "thrifty")
            await router.client.delete(f"/v1/prefixes/{prefix_id}", headers=key("thrifty"))
            goes_on.set()
            assert (await asking).status_code == 404
        else:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            goes_on.set()
        assert (await hold(router, "thrifty", prompt=[3] * 64)).status_code == 429


class AnotherRouter:
    """The only other one: it keeps a prefix that no replica holds now."""

    def __init__(self, owner: str) -> None:
        self.kept = [PinnedPrefix(PinId("prefix-remade"), owner, 5, 1, (), 1.0, 2e9, "another")]
        self.is_hung = False

    async def kept_prefixes(self, asker: str, timeout_s: float) -> list[bytes | None]:
        return [b"", None if self.is_hung else encode_kept("another", self.kept)]

    async def prefix_given_back(self, asker: str, pin_id: PinId, timeout_s: float) -> list[bool]:
        before, self.kept = self.kept, [pin for pin in self.kept if pin.pin_id != pin_id]
        return [False, len(self.kept) < len(before)]

    async def prefixes_handed_on(self, asker: str, given_back: GivenBack, timeout_s: float) -> bool:
        return True


async def test_what_another_router_makes_again_is_its_keys_like_any_other(tmp_path: Path) -> None:
    """Found, listed, counted and given back; a key that is not its own sees nothing of it."""
    async with holding(tenants=with_keys(tmp_path)) as (router, replicas):
        router.parts.directory.others = another = AnotherRouter(ApiKey("one", "one").owner)
        path = "/v1/prefixes/prefix-remade"
        for name, status in (("one", 200), ("bob", 404)):
            assert (await router.client.get(path, headers=key(name))).status_code == status
        shown = (await router.client.get(path, headers=key("one"))).json()
        assert (shown["status"], shown["replicas"], shown["copies"]) == ("partial", [], 1)
        assert (await ids_of(router, "one"), await ids_of(router, "bob")) == (["prefix-remade"], [])
        assert error_of(await hold(router, "one"))["code"] == "prefix_limit_reached"
        assert (await router.client.delete(path, headers=key("bob"))).status_code == 404
        assert (await router.client.delete(path, headers=key("one"))).json()["deleted"] is True
        assert another.kept == []
        assert (await router.client.get(path, headers=key("one"))).status_code == 404
        assert (await hold(router, "one")).status_code == 200
        assert len(replicas.pins) == 1


async def test_what_a_router_may_keep_that_does_not_answer_is_to_be_asked_for_again() -> None:
    async with holding() as (router, _replicas):
        router.parts.directory.others = another = AnotherRouter("")
        another.is_hung = True
        for ask in (router.client.get, router.client.delete):
            answer = await ask("/v1/prefixes/prefix-remade")
            assert (answer.status_code, error_of(answer)["code"]) == (503, "router_unheard")
            assert answer.headers["retry-after"] == "1"
        assert [each.pin_id for each in another.kept] == ["prefix-remade"]
