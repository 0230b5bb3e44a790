"""Who is taken to wait at a replica: as long as it waits there, and nowhere else."""

from __future__ import annotations

import pytest

from cache.events import QueuedPrompts
from cache.scheduling_order import SchedulingOrder
from cache.types import ReplicaId, RequestId
from router.placement.replica_queue import LAST
from tests.fakes.held import TOKEN_S, HoldingRouter
from tests.fakes.router import BLOCK_SIZE, query, replica_id, told

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
    return set(router.routing.queues.passable)


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
    assert len(router.routing.queues) == 0


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


# -- what engines say -----------------------------------------------------------------------------


def named(router: HoldingRouter, replica: ReplicaId, *num_blocks: int) -> None:
    """The replica says that it has taken the long prompt in, and that so many blocks each wait there."""
    router.report(replica, admitted=(NAME,), queued=(told(*num_blocks),) if num_blocks else ())


def test_who_is_named_is_counted_by_whoever_names_it(router: HoldingRouter) -> None:
    named(router, A, LONG)
    assert waiting(router) == {A}
    assert passed(router, A) == pytest.approx(0.0), "its latest account has nobody"
    named(router, A, LONG, LONG)
    router.routing.first_token(NAME, A, 0)
    assert waiting(router) == {A}, "another Router's waits there, too"
    named(router, A)
    assert waiting(router) == set()


def test_who_is_named_before_it_is_known_who_has_accepted_it_counts_once(router: HoldingRouter) -> None:
    """The engine's word may come before its answer to the call."""
    named(router, B, LONG)
    router.routing.routed(NAME, B)
    assert waiting(router) == {B}
    router.report(B)
    assert waiting(router) == set()
    assert len(router.routing.queues) == 1, "it waits for its first token still"


def test_what_is_behind_all_places_that_are_told_may_be_before_whoever_comes(router: HoldingRouter) -> None:
    """Of a long queue its engine tells the first places, and the sums of the rest."""
    router.routing.release(NAME)
    told_of = QueuedPrompts("", 1.0, 0.0, (0.5, 2.0), (1000, 4000), num_more=3, more_tokens=15_000)
    router.report(A, queued=(told_of,))
    queue = router.routing.queues.passable[A]
    at = 0.1 * router.clock()
    for place, part, num_behind in ((0.1, 0.0, 5), (1.0, 0.05, 4), (2.5, 1.0, 0)):
        assert queue.met("", 100, 1.0, at + place) == pytest.approx((part, num_behind))
    assert queue.last_place("") == pytest.approx(at + 2.0)


def test_an_account_of_other_tenants_is_taken_by_their_turns(router: HoldingRouter) -> None:
    router.routing.release(NAME)
    others = QueuedPrompts("other", 3.0, 20.0, (), (), num_more=2, more_tokens=900)
    router.report(A, queued=(told(10), others))
    queues, own = router.routing.queues, 10 * BLOCK_SIZE + 1
    assert queues.passable[A].last_place("") == LAST
    part = queues.before(A, "", 50, 1.0, LAST)
    turn = own + 50 - 20
    assert part == pytest.approx((own + 3 * turn) / (own + 900)), "three times the share, three times as much"
    assert queues.may_stand_back({""})


def test_one_that_has_left_has_nobody_waiting(router: HoldingRouter) -> None:
    named(router, A, LONG)
    router.routing.replica_lost(A)
    queues = router.routing.queues
    assert not queues.may_stand_back({"another"})
    assert len(queues) == 0
