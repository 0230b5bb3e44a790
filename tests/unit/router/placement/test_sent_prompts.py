"""Who is taken to wait at a replica: as long as it waits there, and nowhere else."""

from __future__ import annotations

import pytest

from cache.scheduling_order import SchedulingOrder
from cache.types import ReplicaId, RequestId
from tests.fakes.held import TOKEN_S, HoldingRouter
from tests.fakes.router import BLOCK_SIZE, query, replica_id

A, B = replica_id(0), replica_id(1)
LONG = 320  # blocks: ten steps
NAME = RequestId("long")


@pytest.fixture
def router() -> HoldingRouter:
    """Of two replicas where prompts stand back; a long one was sent to the first."""
    router = HoldingRouter(num_replicas=2, scheduling_order=SchedulingOrder.SHORTEST_PREEMPTING)
    assert router.routing.choose(query(NAME, LONG, excluded=frozenset({B}))).replica_id == A
    assert waiting(router) == {A}
    return router


def waiting(router: HoldingRouter) -> set[ReplicaId]:
    """Where something is taken to wait."""
    sent = router.routing.sent
    return {name for name in router.infos if sent.last_place(name, "") > float("-inf")}


def passed(router: HoldingRouter, replica: ReplicaId) -> float:
    """How many prompts a short request would pass there, with so much queued as the engine says."""
    router.report(replica, backlog_s=LONG * BLOCK_SIZE * TOKEN_S)
    decision = router.routing.weigh(query("short", 1, excluded=frozenset(router.infos) - {replica}))
    price = decision.ranking.best.price
    assert price is not None
    return price.passed_s / decision.prefill_s


def test_it_waits_where_it_was_accepted(router: HoldingRouter) -> None:
    router.routing.routed(NAME, A)
    assert waiting(router) == {A}
    router.routing.routed(NAME, B)
    assert waiting(router) == {B}
    assert passed(router, A) == 0.0
    assert passed(router, B) == pytest.approx(1.0)
    router.routing.first_token(NAME, B, 0)
    assert waiting(router) == set()


def test_who_was_accepted_where_nobody_is_known_waits_nowhere(router: HoldingRouter) -> None:
    router.routing.replica_lost(B)
    router.routing.routed(NAME, B)
    assert waiting(router) == set()
    router.routing.finish(NAME)
    assert len(router.routing.sent) == 0


def test_an_answer_that_is_continued_waits_no_more(router: HoldingRouter) -> None:
    """The first token of all came before, from whoever had it first: no other is told of."""
    router.routing.first_token(NAME, A, 0)
    router.routing.release(NAME)
    assert router.routing.choose(query(NAME, LONG + 1, excluded=frozenset({A}))).replica_id == B
    router.routing.routed(NAME, B)
    assert waiting(router) == {B}
    router.routing.continued(NAME)
    assert waiting(router) == set()
    assert passed(router, B) == 0.0


def test_an_attempt_that_is_over_waits_no_more(router: HoldingRouter) -> None:
    """Also while the request waits for its next one."""
    router.routing.release(NAME)
    assert waiting(router) == set()
    assert passed(router, A) == 0.0
