"""Requests that wait at the router for engines in which longer prompts stand back for shorter ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.priority import LEVEL_S
from cache.scheduling_order import AGING, SchedulingOrder
from cache.types import RequestId
from router.placement.replica_queue import LAST
from tests.fakes.held import TOKEN_S, A, B, HoldingRouter
from tests.fakes.router import BLOCK_SIZE, query, told

LONG = 1000  # blocks


def behind_a_long_prompt(order: SchedulingOrder, **engine: Any) -> HoldingRouter:
    """One replica, at work on a long prompt of this router's, as it says."""
    router = HoldingRouter(scheduling_order=order)
    router.submit("long", LONG)
    assert router.poll() == ["long"]
    works(router, LONG, admitted=("long",), **engine)
    return router


def works(router: HoldingRouter, *num_blocks: int, age_s: float = 0.0, **engine: Any) -> None:
    """The first replica says that it is at prompts of so many blocks, all of that age."""
    backlog_s = sum(num_blocks) * BLOCK_SIZE * TOKEN_S
    router.report(A, backlog_s=backlog_s, queued=(told(*num_blocks, age_s=age_s),), **engine)


@pytest.mark.parametrize("order", SchedulingOrder)
def test_who_is_shorter_does_not_wait_for_what_stands_back(order: SchedulingOrder) -> None:
    router = behind_a_long_prompt(order, num_running=1)
    router.submit("short", 10)
    assert router.poll() == (["short"] if order.preempts else [])
    router.submit("longer", LONG + 1)
    assert router.poll() == []


def test_what_goes_before_it_holds_it_back_and_nothing_else() -> None:
    """Two are there: it waits for the one whose place is earlier, and is sent when that one has its token."""
    router = behind_a_long_prompt(SchedulingOrder.SHORTEST_PREEMPTING, num_running=1)
    router.submit("short", 100)
    assert router.poll() == ["short"]
    router.submit("between", 300)
    assert router.poll() == []
    router.routing.first_token(RequestId("short"), A, 0)
    works(router, LONG, num_running=2)
    router.clock.advance(0.1)  # first tokens are no report: it is weighed anew after a while
    assert router.poll() == ["between"]


def test_who_waits_here_for_the_same_replica_is_before_it_in_full() -> None:
    """Though what is queued there would stand back for both."""
    router = behind_a_long_prompt(SchedulingOrder.SHORTEST_PREEMPTING, num_running=1)
    router.submit("first", 200)
    router.submit("second", 201)
    assert router.poll() == ["first"]
    router.submit("third", 50)
    assert router.poll() == ["third"]
    assert router.poll() == [], "the engine computes the two others first"


def test_waiting_outweighs_length_as_in_the_engine() -> None:
    """A prompt of s seconds is overtaken for s / AGING seconds, and for LEVEL_S longer by a level."""
    own_s = LONG * BLOCK_SIZE * TOKEN_S
    router = behind_a_long_prompt(SchedulingOrder.SHORTEST_PREEMPTING, num_running=1)
    router.clock.advance(0.95 * own_s / AGING)
    works(router, LONG, num_running=1, age_s=0.95 * own_s / AGING)
    router.submit("in time", 1)
    assert router.poll() == ["in time"]
    router.clock.advance(0.1 * own_s / AGING)
    works(router, LONG, num_running=1, age_s=1.05 * own_s / AGING)
    router.submit("late", 1)
    assert router.poll() == []
    router.held.withdraw(RequestId("late"))
    router.held.submit(query("late and urgent", 1, priority=-1))
    assert 0.1 * own_s / AGING < LEVEL_S
    assert router.poll() == ["late and urgent"]


def test_nobody_gives_up_a_place() -> None:
    router = behind_a_long_prompt(SchedulingOrder.SHORTEST_PREEMPTING, num_running=64)
    router.submit("short", 1)
    assert router.poll() == []


def test_who_is_shorter_does_not_wait_for_another_replica_to_fall_idle() -> None:
    """Two replicas at long prompts: who has nothing cached goes before one of them, and has its first token
    in a step of its own. What is as long, but for what it shares with one of them, waits."""
    router = HoldingRouter(num_replicas=2, scheduling_order=SchedulingOrder.SHORTEST_PREEMPTING)
    router.held.submit(query("of A", LONG))
    router.held.submit(query("of B", LONG + 10))
    assert sorted(router.poll()) == ["of A", "of B"]
    router.held.submit(query("cold", 10))
    assert router.poll() == ["cold"]
    own = query("its next turn", LONG + 5)
    own = own._replace(block_hashes=query("of B", LONG + 10).block_hashes[: LONG + 5])
    router.held.submit(own)
    assert router.poll() == [], "what it shares with that one is not there before it has been computed"
    router.held.withdraw(own.request_id)
    router.store(B, own.block_hashes)
    router.held.submit(own)
    [departure] = router.held.poll()
    assert departure.request_id == "its next turn"
    assert departure.placement is not None
    assert departure.placement.replica_id == B


@pytest.mark.parametrize("is_late", [True, False])
def test_nobody_goes_first_where_nobody_is_started(is_late: bool) -> None:
    """Two replicas at long prompts, late or short of blocks: as well wait here, for whichever is better."""
    router = HoldingRouter(num_replicas=2, scheduling_order=SchedulingOrder.SHORTEST_PREEMPTING)
    router.routing._loads.residence.observe(10.0)
    router.held.submit(query("of A", LONG))
    router.held.submit(query("of B", LONG + 10))
    assert sorted(router.poll()) == ["of A", "of B"]
    full = {} if is_late else {"free_blocks": 0, "context_tokens": 100, "num_waiting": 1}
    for replica, name in ((A, "of A"), (B, "of B")):
        router.report(replica, backlog_s=5.0, admitted=(name,), num_running=5, **full)
        if is_late:
            router.routing._loads[replica].delay(router.clock() + 20.0)
    for number in range(4):
        router.submit(f"short{number}", 10 + number)
    assert router.poll() == []


def test_an_idle_replica_is_taken_all_the_same() -> None:
    router = HoldingRouter(num_replicas=2, scheduling_order=SchedulingOrder.SHORTEST_PREEMPTING)
    router.report(A, backlog_s=5.0, num_running=1)
    router.submit("short", 10)
    [departure] = router.held.poll()
    assert departure.placement is not None
    assert departure.placement.replica_id == B


@given(st.lists(st.integers(1, 500), max_size=12), st.integers(1, 500))
def test_of_ones_own_what_has_an_earlier_place_goes_before(lengths: list[int], own: int) -> None:
    """All of it where nobody stands back; each prompt until its first token."""
    router = HoldingRouter(scheduling_order=SchedulingOrder.SHORTEST_PREEMPTING)
    queues = router.routing.queues
    for number, num_blocks in enumerate(lengths):
        router.routing.choose(query(str(number), num_blocks))
    asked = query("own", own)
    place = queues.place(A, asked, router.routing.weigh(asked).prefill_s, router.clock())
    shorter = sum(BLOCK_SIZE * each + 1 for each in lengths if each <= own)
    total = sum(BLOCK_SIZE * each + 1 for each in lengths)
    part = queues.before(A, "", own, 1.0, place)
    assert part == pytest.approx(shorter / total if lengths else 1.0)
    assert queues.before(A, "", own, 1.0, LAST) == 1.0
    assert queues.may_stand_back({""}) == bool(lengths)
    for number in range(len(lengths)):
        router.routing.first_token(RequestId(str(number)), A, 0)
    assert len(queues) == 0
    assert not queues.may_stand_back({""})
