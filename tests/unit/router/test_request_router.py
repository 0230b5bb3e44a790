"""Serve's routing hook without Serve: how ranked ids become ranked replicas."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from cache.messages import GenerateRequest, InheritPin, ReleasePin, SamplingParams
from cache.types import PinId, ReplicaId, RequestId
from router.config import RouterConfig
from router.errors import NoReplica
from router.placement.decision import RouteQuery
from router.placement.registry import register_routing, unregister_routing
from router.placement.routing import Routing
from router.request_router import WarmpathRequestRouter
from tests.fakes.http import FINGERPRINT, MODEL, a_replica_info


@dataclass(frozen=True)
class FakeReplica:
    """As much of a RunningReplica as the hook looks at."""

    name: str
    replica_metadata: dict[str, Any] = field(default_factory=lambda: {"warmpath": a_replica_info().to_json()})

    @property
    def replica_id(self) -> Any:
        return SimpleNamespace(unique_id=self.name)


A, B, C = FakeReplica("a"), FakeReplica("b"), FakeReplica("c")


@pytest.fixture
def routing() -> Iterator[Routing]:
    made = Routing(RouterConfig(model_name=MODEL, tokenizer="t", fingerprint=FINGERPRINT, seed=1))
    made.update_replicas({ReplicaId(name): a_replica_info() for name in "abc"})
    register_routing("test", made)
    yield made
    unregister_routing("test")


@pytest.fixture
def hook(routing: Routing) -> Any:
    made = WarmpathRequestRouter.__new__(WarmpathRequestRouter)
    made.initialize_state(routing_key="test")
    made._remove_pending_request_from_indices = lambda _pending: None
    return made


def _pending(*args: Any) -> Any:
    return SimpleNamespace(
        args=list(args),
        routing_context=SimpleNamespace(should_backoff=False),
        future=asyncio.get_running_loop().create_future(),
    )


def _request(ranks: str, excluded: str = "") -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("r"),
        token_ids=array("i", [1, 2]),
        num_prompt_tokens=2,
        sampling=SamplingParams(max_tokens=1),
        seed=0,
        ranks=tuple(map(ReplicaId, ranks)),
        excluded_replicas=frozenset(map(ReplicaId, excluded)),
    )


async def test_ranks_are_followed_one_replica_each(hook: Any) -> None:
    assert await hook.choose_replicas([A, B, C], _pending(_request("cab"))) == [[C], [A], [B]]


async def test_ranks_that_are_gone_or_excluded_are_dropped(hook: Any) -> None:
    assert await hook.choose_replicas([A, B], _pending(_request("bca", excluded="a"))) == [[B]]


async def test_where_the_first_choice_is_gone_it_asks_for_new_ranks(hook: Any, routing: Routing) -> None:
    """What was decided holds no more: the second was chosen for one that the first would not serve."""
    routing.choose(RouteQuery(RequestId("r"), (), 2))
    routing.update_replicas({ReplicaId("a"): a_replica_info(), ReplicaId("b"): a_replica_info()})
    for _ in range(30):  # of other requests that are on their way
        routing.choose(RouteQuery(RequestId("another"), (), 2, frozenset({ReplicaId("b")})))
    assert await hook.choose_replicas([A, B], _pending(_request("cab"))) == [[B], [A]]
    assert await hook.choose_replicas([A, B], _pending(_request("abc"))) == [[A], [B]]


async def test_a_replica_of_another_model_is_nobodys_last_resort(hook: Any, routing: Routing) -> None:
    other = a_replica_info(fingerprint=replace(FINGERPRINT, revision="another"))
    routing.update_replicas({ReplicaId("a"): a_replica_info(), ReplicaId("b"): other})
    routing.choose(RouteQuery(RequestId("r"), (), 2))
    assert await hook.choose_replicas([A, B], _pending(_request("c"))) == [[A]]  # its first choice is gone
    pending = _pending(_request("a"))
    await hook.choose_replicas([B], pending)
    with pytest.raises(NoReplica):
        pending.future.result()


async def test_serve_is_told_to_back_off_or_it_would_ask_again_without_pause(hook: Any) -> None:
    pending = _pending(_request("abc"))
    await hook.choose_replicas([A], pending)
    assert pending.routing_context.should_backoff


async def test_when_the_ranks_ran_out_it_asks_for_new_ones(hook: Any, routing: Routing) -> None:
    """Serve asks again for the same request after every rank was full or rejected it."""
    routing.choose(RouteQuery(RequestId("r"), (), 2, frozenset({ReplicaId("a")})))
    pending = _pending(_request("b", excluded="a"))
    assert await hook.choose_replicas([A, B, C], pending) == [[B]]
    again = await hook.choose_replicas([A, B, C], pending)
    assert sorted(replica.name for rank in again for replica in rank) == ["b", "c"]


async def test_a_request_nobody_may_take_fails_at_its_caller(hook: Any) -> None:
    """Raising here, or returning no rank, would leave the caller waiting for ever."""
    pending = _pending(_request("a", excluded="ab"))
    assert await hook.choose_replicas([A, B], pending) == [[A]]  # Serve's loop ends only with a rank
    with pytest.raises(NoReplica):
        pending.future.result()


async def test_other_calls_may_go_anywhere(hook: Any) -> None:
    assert await hook.choose_replicas([A, B], _pending()) == [[A, B]]
    assert await hook.choose_replicas([A, B], _pending("describe")) == [[A, B]]
    assert await hook.choose_replicas([A, B], None) == [[A, B]]


async def test_who_accepted_is_passed_on(hook: Any, routing: Routing) -> None:
    routing.choose(RouteQuery(RequestId("r"), (), 2))
    hook.on_request_routed(_pending(_request("ab")), B.replica_id, None)
    assert routing.accepted_by(RequestId("r")) == "b"


async def test_without_a_routing_in_the_process_any_replica_will_do() -> None:
    """A script's own handle on the deployment."""
    hook: Any = WarmpathRequestRouter.__new__(WarmpathRequestRouter)
    hook.initialize_state(routing_key="nobody")
    assert await hook.choose_replicas([A, B], _pending(_request("b"))) == [[A, B]]


def test_metadata_becomes_replica_info_and_nonsense_gets_no_requests(hook: Any) -> None:
    odd = [
        FakeReplica("x", {}),
        FakeReplica("y", {"warmpath": {"fingerprint": 1}}),
        FakeReplica("z", {"warmpath": 5}),
    ]
    assert hook._infos([A, *odd]) == {"a": a_replica_info(), "x": None, "y": None, "z": None}


async def test_nor_as_a_last_resort(hook: Any, routing: Routing) -> None:
    """Who told nothing readable was asked behind those that had."""
    odd = FakeReplica("b", {})
    routing.update_replicas(hook._infos([A, odd]))
    routing.choose(RouteQuery(RequestId("r"), (), 2))
    assert await hook.choose_replicas([A, odd], _pending(_request("c"))) == [[A]]


@pytest.mark.parametrize(
    "call",
    [
        ReleasePin(PinId("prefix-1"), ReplicaId("b")),
        InheritPin(PinId("prefix-1"), ReplicaId("b"), keeper="router0", heir="router1"),
    ],
)
async def test_a_call_to_one_replica_goes_to_that_one(hook: Any, call: ReleasePin | InheritPin) -> None:
    pending = _pending(call)
    assert await hook.choose_replicas([A, B, C], pending) == [[B]]
    hook.on_request_routed(pending, B.replica_id, None)  # it is no generation: nothing is booked


async def test_where_that_one_is_gone_nobody_answers_in_its_place(hook: Any) -> None:
    pending = _pending(ReleasePin(PinId("prefix-1"), ReplicaId("gone")))
    await hook.choose_replicas([A, B], pending)
    with pytest.raises(NoReplica):
        pending.future.result()
