"""Laws of what tenants get of an engine's steps. `test_tenant_shares` has the shares that they are of."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.scheduling_order import SchedulingOrder
from replica.scheduling.request import Request, RequestState
from replica.scheduling.turns import CREDIT_STEPS
from tests.fakes.engine import BLOCK_SIZE, make_request, sim_core
from tests.fakes.scheduling import BUDGET, Engine, Job, orders

CREDIT = CREDIT_STEPS * BUDGET


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 200)), min_size=8, max_size=60),
    orders,
    st.integers(2, 40),
)
@settings(max_examples=80)
def test_tenants_that_both_wait_get_equal_parts(
    sizes: list[tuple[int, int]], order: SchedulingOrder, num_steps: int
) -> None:
    """Computed tokens of two that always had somebody waiting differ by a request and a step at most."""
    engine = Engine(order, max_running=1000)
    requests = [
        engine.submit(number, Job(0.0, length, tenant=str(tenant)))
        for number, (tenant, length) in enumerate(sizes)
    ]
    computed = dict.fromkeys("0123", 0)
    for _ in range(num_steps):
        for request, num_tokens in engine.step():
            computed[request.tenant] += num_tokens
        waiting = {r.tenant for r in requests if r.state is RequestState.WAITING}
        if not len(engine.scheduler):
            break
        for one in waiting:
            for other in waiting:
                assert abs(computed[one] - computed[other]) <= 200 + BUDGET + CREDIT


@given(st.sampled_from([0.5, 2.0, 5.0]), orders)
def test_tenants_get_by_their_shares(share: float, order: SchedulingOrder) -> None:
    engine = Engine(order, max_running=1000)
    for number in range(400):
        each = Job(0.0, BUDGET, tenant="ab"[number % 2], share=share if number % 2 else 1.0)
        engine.submit(number, each)
    computed = {"a": 0, "b": 0}
    for _ in range(150):
        for request, num_tokens in engine.step():
            computed[request.tenant] += num_tokens
    assert abs(computed["b"] / share - computed["a"]) <= (1 + 1 / share) * (BUDGET + CREDIT)
    assert abs(computed["b"] / computed["a"] / share - 1) < 0.4


@given(st.integers(1, 10), orders)
def test_what_a_tenant_did_not_use_is_gone(num_idle: int, order: SchedulingOrder) -> None:
    """Who comes after the others have had much gets its part from then on, not all until it has caught up."""
    engine = Engine(order, max_running=1000)
    for number in range(40):
        engine.submit(number, Job(0.0, 2 * BUDGET, tenant="busy"))
    for _ in range(num_idle):
        engine.step()
    for number in range(40, 60):
        engine.submit(number, Job(0.0, 2 * BUDGET, tenant="late"))
    computed = {"busy": 0, "late": 0}
    for _ in range(20):
        for request, num_tokens in engine.step():
            computed[request.tenant] += num_tokens
    assert abs(computed["busy"] - computed["late"]) <= 2 * BUDGET + CREDIT


@given(st.integers(1, 40), orders)
def test_places_are_kept_for_who_has_less_than_its_part(max_running: int, order: SchedulingOrder) -> None:
    """Once there are several tenants: whoever comes beside another's long answers waits for none to end."""
    engine = Engine(order, max_running=max_running)
    kept = max_running // 8
    engine.submit(0, Job(0.0, 4, tenant="modest"))
    engine.step()
    for number in range(1, max_running + 2):
        engine.submit(number, Job(0.0, 4, 200, tenant="greedy"))
    for _ in range(max_running + 1):
        engine.step()
    assert engine.scheduler.num_running == max_running - kept
    for number in range(100, 100 + kept):
        engine.submit(number, Job(engine.now_s, 4, tenant="modest"))
    for _ in range(kept):
        engine.step()
    assert engine.started[max_running - kept + 1 :] == list(range(100, 100 + kept))


def test_a_tenant_is_not_charged_for_what_is_cached_nor_twice() -> None:
    engine = Engine(SchedulingOrder.FIRST_COME)
    shares = engine.scheduler._turns._shares
    engine.submit(0, Job(0.0, 40, tenant="a"))
    engine.step()
    engine.submit(0, Job(0.0, 40, tenant="b"))  # the same tokens: all but the last block are there
    engine.step()
    assert shares._charged == {"a": 40, "b": BLOCK_SIZE}


def test_what_a_tenant_has_had_is_remembered_while_nobody_waits() -> None:
    """Before an engine stands a Router, which lets few wait: its queue is empty between any two of them."""
    engine = Engine(SchedulingOrder.FIRST_COME)
    for number in range(3):
        engine.submit(number, Job(0.0, 40, tenant="much"))
        while len(engine.scheduler):
            engine.step()
    engine.submit(3, Job(0.0, 2 * BUDGET, tenant="much"))
    engine.submit(4, Job(0.0, 2 * BUDGET, tenant="little"))
    assert [request.tenant for request, _ in engine.step()] == ["little"]


@given(st.integers(8, 40), st.integers(1, 60), st.booleans())
def test_many_answers_to_one_prompt_take_no_more_places_than_as_many_requests(
    max_running: int, n: int, comes_early: bool
) -> None:
    """They took all, and whoever came next waited for one of them to end; or, while their prompt was
    computed, for places that stood empty."""
    core = sim_core(2048, max_running=max_running, max_batched_tokens=64, max_wait_s=None)

    def ask(name: str, tenant: str, num_prompt: int, **asked: int) -> list[Request]:
        request = make_request(
            name, range(num_prompt), max_tokens=asked.get("max_tokens", 2), temperature=1.0
        )
        return core.take(replace(request, tenant=tenant, n=asked.get("n", 1)))

    ask("earlier", "modest", 3)
    for _ in range(3):
        core.step()
    ask("many", "greedy", 1000, n=n, max_tokens=200)
    for _ in range(1 if comes_early else 20):
        core.step()
    (modest,) = ask("later", "modest", 3)
    for _ in range(5):
        core.step()
    assert modest.num_output_tokens > 0
