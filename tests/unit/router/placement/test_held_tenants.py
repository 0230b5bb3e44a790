"""Requests that wait at the router: whose tenant's turn it is, by shares, and how urgent they are."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import count, islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.events import QueuedPrompts
from cache.priority import LEVEL_S, MAX_PRIORITY, MIN_PRIORITY
from cache.types import RequestId
from router.errors import AllBusy
from router.placement import held_queue
from router.placement.held_queue import CREDIT_TOKENS, HeldQueue
from router.placement.held_request import HeldRequest
from tests.fakes.held import OPTIONS, TOKEN_S, A, HoldingRouter
from tests.fakes.router import BLOCK_SIZE, query, told

NUMBERS = count()
ROOMY = replace(OPTIONS, max_held_per_replica=10_000, window=8)


def a_busy_router(**changes: Any) -> HoldingRouter:
    router = HoldingRouter(options=replace(ROOMY, **changes))
    router.report(A, backlog_s=100.0)
    return router


def hold(router: HoldingRouter, name: str, num_blocks: int, **of: Any) -> None:
    router.held.submit(query(name, num_blocks, **of))


def is_taken_in(router: HoldingRouter, own_s: float, tenant: str) -> bool:
    """A prompt of so many seconds; its name begins with its tenant's, and nobody has had it before."""
    try:
        hold(router, f"{tenant} {next(NUMBERS)}", round(own_s / TOKEN_S / BLOCK_SIZE), tenant=tenant)
    except AllBusy:
        return False
    return True


def leave(router: HoldingRouter) -> list[str]:
    """Who is first to leave, when the replica has caught up; it is kept busy by nobody after that."""
    router.report(A)
    left = router.poll()
    for name in left:
        router.routing.release(RequestId(name))
    router.report(A, backlog_s=100.0)
    return left


def drain(router: HoldingRouter) -> list[str]:
    left: list[str] = []
    while len(router.held):
        left += leave(router)
        router.clock.advance(0.01)
    return left


def test_a_crowd_of_one_tenant_is_not_before_anothers_request() -> None:
    """Though all of it came earlier, and is shorter."""
    router = a_busy_router()
    for number in range(50):
        hold(router, f"crowd {number}", 2, tenant="crowd")
    hold(router, "other", 300, tenant="other")
    assert leave(router)[0].startswith("crowd")  # nobody has had anything yet: whoever came first
    assert "other" in leave(router) + leave(router)


@pytest.mark.parametrize("share", [1.0, 3.0])
def test_tenants_leave_by_their_shares(share: float) -> None:
    router = a_busy_router()
    num_blocks = 4 * CREDIT_TOKENS // BLOCK_SIZE // 100
    for number in range(100):
        hold(router, f"a{number}", num_blocks, tenant="a")
        hold(router, f"b{number}", num_blocks, tenant="b", share=share)
    left = [name[0] for name in drain(router)[:80]]
    assert left.count("b") == pytest.approx(80 * share / (1 + share), abs=4)


def test_what_was_generated_counts_too() -> None:
    """Who has had long answers lately stands back with its prompts."""
    router = a_busy_router()
    for number in range(20):
        for tenant in "ab":
            hold(router, f"{tenant}{number}", 10, tenant=tenant)
    router.held.served("a", 100_000, 1.0)
    assert all(name.startswith("b") for name in drain(router)[:20])


def test_what_was_had_while_nobody_waited_counts() -> None:
    """Else whoever has taken nine tenths starts level with the other whenever the queue was empty."""
    router = HoldingRouter(options=ROOMY)
    for name, tenant, num_tokens in (("m", "much", 9000), ("l", "little", 1000)):
        hold(router, name, 1, tenant=tenant)
        assert router.poll() == [name]
        router.routing.release(RequestId(name))
        router.held.served(tenant, num_tokens, 1.0)
    router.report(A, backlog_s=100.0)
    hold(router, "much", 10, tenant="much")
    hold(router, "little", 100, tenant="little")
    assert drain(router) == ["little", "much"]


def test_another_tenants_prompt_does_not_hold_back_who_goes_before_it() -> None:
    """The engine takes turns: what one has queued there is not before the other's."""
    router = HoldingRouter(options=ROOMY)
    hold(router, "long", 500, tenant="much")
    assert router.poll() == ["long"]
    had_much = told(500, tenant="much", had=9000.0)
    router.report(A, backlog_s=1.0, admitted=("long",), queued=(had_much,))
    hold(router, "its own", 10, tenant="much")
    hold(router, "other", 10, tenant="other")
    assert router.poll() == ["other"]
    router.report(A, backlog_s=1.0, admitted=("other",))
    hold(router, "after it", 10, tenant="other")
    assert router.poll() == [], "what keeps the replica busy now is nobody's that is known"
    for name in ("long", "other"):
        router.routing.release(RequestId(name))
    router.report(A)
    assert set(router.poll()) == {"its own", "after it"}


def test_what_goes_before_it_is_worked_on_first() -> None:
    """A request behind a part of another tenant's prompt is sent when that part is done, and looked at then:
    not again and again, for it comes no closer by being looked at."""
    router = HoldingRouter(options=ROOMY)
    long = 40_000
    blocks = long // BLOCK_SIZE
    hold(router, "long", blocks, tenant="a")
    assert router.poll() == ["long"]
    router.report(A, backlog_s=long * TOKEN_S, admitted=("long",), queued=(told(blocks, tenant="a"),))
    hold(router, "short", 500, tenant="b")
    assert router.poll() == []
    began_at, num_looks = router.clock.now, 0
    while not (left := router.poll()):
        router.clock.now = router.held.next_poll_at() or math.inf
        num_looks += 1
        assert num_looks < 20
    assert left == ["short"]
    before_s = 500 * BLOCK_SIZE * TOKEN_S  # as much of the other's as its own is
    assert before_s - 0.2 <= router.clock.now - began_at <= before_s


sent = st.tuples(st.sampled_from("abc"), st.integers(1, 5000), st.sampled_from([0.5, 1.0, 4.0]))


@given(st.lists(sent, max_size=12), sent, st.dictionaries(st.sampled_from("abc"), st.integers(0, 5000)))
@settings(max_examples=100)
def test_what_goes_before_is_as_much_as_start_time_fair_queueing_serves(
    prompts: list[tuple[str, int, float]], own: tuple[str, int, float], had: dict[str, int]
) -> None:
    """Of each other tenant's tokens there, those of which it is the turn until `own` is done."""
    tenant, num_tokens, share = own
    router = HoldingRouter(options=ROOMY)
    queues = router.routing.queues
    shares = {name: share for name, _, share in [*prompts, own]}
    left: Counter[str] = Counter()
    for name, num_sent, _ in prompts:
        left[name] += num_sent
    said = [
        QueuedPrompts(name, shares[name], had.get(name, 0), more_tokens=left[name], num_more=1)
        for name in left
    ]
    router.report(A, backlog_s=1.0, queued=tuple(said))
    part = queues.before(A, tenant, num_tokens, shares[tenant])
    own_had = had.get(tenant, 0) if tenant in left else 0  # a newcomer there
    done_at = own_had + (left[tenant] + num_tokens) / shares[tenant]
    before = sum(
        n if name == tenant else min(n, max(0.0, (done_at - had.get(name, 0)) * shares[name]))
        for name, n in left.items()
    )
    assert part == pytest.approx(before / left.total() if left else 1.0)
    assert queues.may_stand_back({tenant}) == any(name != tenant for name in left)
    router.report(A)
    assert not queues.may_stand_back({"another"})
    assert not queues.may_stand_back({tenant})
    assert queues.before(A, tenant, num_tokens, share) == 1.0


def test_a_queue_that_another_tenant_has_filled_is_not_full() -> None:
    router = a_busy_router(max_held_per_replica=10)
    for number in range(10):
        hold(router, f"crowd {number}", 2, tenant="crowd")
    with pytest.raises(AllBusy):
        hold(router, "one too many", 2, tenant="crowd")
    for number in range(5):
        hold(router, f"other {number}", 2, tenant="other")
    with pytest.raises(AllBusy):
        hold(router, "other 5", 2, tenant="other")


def test_who_would_wait_too_long_is_asked_of_its_tenants_part() -> None:
    """Ten seconds of one tenant are held; another's request is served after as much as its own."""
    router = a_busy_router(max_wait_s=11.5)
    router.report(A, backlog_s=1.0)
    second = round(1.0 / TOKEN_S / BLOCK_SIZE)
    for number in range(11):
        hold(router, f"crowd {number}", second, tenant="crowd")
    with pytest.raises(AllBusy):
        hold(router, "crowd 11", second, tenant="crowd")
    for number in range(5):
        hold(router, f"other {number}", second, tenant="other")
    with pytest.raises(AllBusy):
        hold(router, "other 5", second, tenant="other")


def test_in_overload_who_has_long_answers_asks_for_more_than_its_prompts() -> None:
    """One replica, one second of prompts a second. "calm" wants 0.6 of it, four at a time, and "chatty" 1.6 s
    in prompts and far more in answers: by prompts alone both ask for more than their half."""
    router = HoldingRouter(options=replace(ROOMY, max_wait_s=10.0, overload_wait_s=0.5))
    own_s, answers = {"calm": 0.3, "chatty": 0.08}, {"calm": 10, "chatty": 5000}
    backlog_s, refused = 0.0, Counter[str]()
    for number in range(600):
        router.report(A, backlog_s=backlog_s)
        for tenant in ["calm"] * 4 * (number % 40 == 0) + ["chatty"]:
            refused[tenant] += not is_taken_in(router, own_s[tenant], tenant)
        for departure in router.held.poll():
            tenant = departure.request_id.split()[0]
            if departure.error is not None:
                refused[tenant] += 1
                continue
            router.routing.release(departure.request_id)
            router.held.served(tenant, answers[tenant], 1.0)
            backlog_s += own_s[tenant]
        backlog_s = max(0.0, backlog_s - 0.05)
        router.clock.advance(0.05)
    assert refused["chatty"] > 200
    assert refused["calm"] == 0


def test_a_level_of_priority_is_so_many_seconds_of_age() -> None:
    router = a_busy_router()
    hold(router, "first", 10)
    hold(router, "later", 10, priority=1)
    router.clock.advance(LEVEL_S - 0.1)
    hold(router, "still before", 10)
    router.clock.advance(0.2)
    hold(router, "urgent", 10, priority=-2)
    hold(router, "too late", 10)
    assert drain(router) == ["urgent", "first", "still before", "later", "too late"]


@pytest.mark.parametrize(
    ("priority", "waited_s", "is_old"), [(0, 19, False), (0, 21, True), (1, 24, False), (1, 26, True)]
)
def test_who_stands_back_is_old_so_much_later(priority: int, waited_s: float, is_old: bool) -> None:
    """Behind more backlog than its length would have it wait for, only who is past the age floor is sent."""
    router = a_busy_router()
    hold(router, "long", round(10.0 / TOKEN_S / BLOCK_SIZE), priority=priority)
    router.clock.advance(waited_s)
    router.report(A, backlog_s=0.15)
    assert (router.poll() == ["long"]) is is_old


def test_who_is_urgent_waits_for_those_as_urgent_alone() -> None:
    router = a_busy_router(max_wait_s=5.0)
    router.report(A, backlog_s=1.0)
    second = round(1.0 / TOKEN_S / BLOCK_SIZE)
    for number in range(5):
        hold(router, f"later {number}", second, priority=1)
    with pytest.raises(AllBusy):
        hold(router, "later 5", second, priority=1)
    for number in range(5):
        hold(router, f"now {number}", second)
    with pytest.raises(AllBusy):
        hold(router, "now 5", second)


asked = st.tuples(
    st.sampled_from("abc"), st.integers(1, 2000), st.integers(MIN_PRIORITY, MAX_PRIORITY) | st.just(0)
)


@given(st.lists(st.tuples(asked, st.floats(0, 30)), min_size=1, max_size=40), st.floats(0, 60))
@settings(max_examples=100)
def test_every_order_has_everybody_once(
    all_of: list[tuple[tuple[str, int, int], float]], floor: float
) -> None:
    """And of each tenant, nobody who has aged stands behind somebody who has not."""
    queue, helds = HeldQueue(), list[HeldRequest]()
    for number, ((tenant, num_tokens, priority), since) in enumerate(all_of):
        asks = query(str(number))._replace(tenant=tenant, priority=priority, num_prompt_tokens=num_tokens)
        held = HeldRequest(asks, since, number, float("inf"), order=0.1 * since)
        queue.add(held)
        helds.append(held)
    turns = list(queue.in_turn(floor))
    assert sorted(held.number for held in turns) == list(range(len(all_of)))
    for tenant in "abc":
        own = [held for held in turns if held.tenant == tenant]
        has_aged = [held.since + held.lag_s <= floor for held in own]
        assert has_aged == sorted(has_aged, reverse=True)
    for held in helds:
        assert queue.seconds_before(held, in_order=False) == 0.0
        queue.remove(held)
    assert len(queue) == queue.num_tenants == len(queue._shares) == 0


def test_a_window_of_many_tenants_looks_at_the_requests_of_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for with each report that comes in; and who has had its turn may leave meanwhile."""
    queue, looked_at = HeldQueue(), list[str]()
    for number in range(200):
        asks = query(str(number))._replace(tenant=str(number % 100))
        queue.add(HeldRequest(asks, float(number), number, float("inf"), order=float(number)))
    in_turn = held_queue._in_turn

    def noted(line: Any, floor: float) -> Any:
        looked_at.append(line.in_order[0].tenant)
        return in_turn(line, floor)

    monkeypatch.setattr(held_queue, "_in_turn", noted)
    for held in islice(queue.in_turn(0.0), 8):
        queue.remove(held)
    assert len(looked_at) == len(set(looked_at)) == 8


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 5000)), min_size=2, max_size=60))
@settings(max_examples=100)
def test_two_that_always_wait_differ_by_a_request_and_the_credit(sizes: list[tuple[str, int]]) -> None:
    """Tokens that have left, of tenants that both have somebody left."""
    queue, had = HeldQueue(), {"a": 0, "b": 0}
    for number, (tenant, num_tokens) in enumerate(sizes):
        asks = query(str(number))._replace(tenant=tenant, num_prompt_tokens=num_tokens)
        queue.add(HeldRequest(asks, 0.0, number, float("inf"), order=0.0))
    while queue.num_tenants == 2:
        assert abs(had["a"] - had["b"]) <= 5000 + CREDIT_TOKENS
        held = next(queue.in_turn(-1.0))
        had[held.tenant] += held.uncached_tokens
        queue.charge(held.tenant, held.uncached_tokens, 1.0)
        queue.remove(held)
