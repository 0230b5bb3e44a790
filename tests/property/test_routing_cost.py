"""What no load, speed or match may change about a cost."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from cache.events import StepTimeModel
from cache.types import ReplicaId
from router.pricing.cost import (
    Candidate,
    RequestShape,
    cost_terms,
    costs,
    expected_time,
    expected_times,
    price_of,
    step_left_s,
    tuning_free,
)
from router.pricing.load_view import LoadView
from tests.fakes.router import view

MODELS = st.builds(
    StepTimeModel,
    base_s=st.floats(1e-6, 1),
    per_token_s=st.floats(0, 1e-2),
    per_attention_s=st.floats(0, 1e-6),
    per_sequence_s=st.floats(0, 1e-2),
)
LOADS = st.builds(
    lambda **changes: view(**changes),
    backlog_s=st.floats(0, 100),
    num_requests=st.integers(0, 500),
    num_running=st.integers(0, 1000),
    context_tokens=st.integers(0, 10**7),
    used_fraction=st.floats(0, 1),
    max_batched_tokens=st.integers(1, 8192),
    step_time=MODELS,
    fleet_time=st.none() | MODELS,
    regret=st.floats(0, 1),
    uses_lost=st.floats(0, 1000),
    alone_s=st.floats(0, 10),
    step_left_s=st.none() | st.floats(0, 10),
)
SHAPES = st.builds(
    RequestShape,
    num_prompt_tokens=st.integers(1, 100_000),
    hot_tokens=st.just(0),
    recompute_weight=st.floats(2, 100),
    hot_share=st.just(1.0),
    most_cached=st.integers(0, 100_000),
)


def cost(load: LoadView, cached: int, shape: RequestShape) -> float:
    """As it is decided with; it must be what is told of it."""
    candidate = Candidate(ReplicaId("r"), load, cached, True)
    [found] = costs([candidate], shape)
    assert math.isclose(found, expected_time(candidate, shape).total_s, rel_tol=1e-9)
    return found


def not_less(larger: float, smaller: float) -> bool:
    return larger >= smaller or math.isclose(larger, smaller, rel_tol=1e-9)


@given(LOADS, SHAPES, st.floats(0, 100), st.floats(0, 10))
def test_more_waiting_there_or_of_others_for_it_never_makes_a_replica_more_attractive(
    load: LoadView, shape: RequestShape, more_s: float, more_alone_s: float
) -> None:
    busier = load._replace(backlog_s=load.backlog_s + more_s)
    more_crowded = busier._replace(alone_s=load.alone_s + more_alone_s)
    assert not_less(cost(busier, 0, shape), cost(load, 0, shape))
    assert not_less(cost(more_crowded, 0, shape), cost(busier, 0, shape))


@given(LOADS, SHAPES, st.floats(0, 100))
def test_what_waits_for_it_is_added_as_it_is(load: LoadView, shape: RequestShape, passed_s: float) -> None:
    price = price_of(load)
    assert price is not None
    met = price._replace(passed_s=passed_s)
    [before], [found] = expected_times([price], [0], shape, 0.0), expected_times([met], [0], shape, 0.0)
    assert math.isclose(found, before + passed_s, rel_tol=1e-9)
    assert math.isclose(found, cost_terms(met, 0, shape, 0.0).total_s, rel_tol=1e-9)


@given(LOADS, SHAPES, st.floats(0, 10), st.floats(0, 10))
def test_a_later_end_of_the_step_in_progress_never_makes_it_more_attractive(
    load: LoadView, shape: RequestShape, left_s: float, more_s: float
) -> None:
    sooner, later = load._replace(step_left_s=left_s), load._replace(step_left_s=left_s + more_s)
    assert not_less(cost(later, 0, shape), cost(sooner, 0, shape))


@given(LOADS, SHAPES, st.floats(0, 10))
def test_no_step_s_end_makes_up_for_what_others_hold(
    load: LoadView, shape: RequestShape, left_s: float
) -> None:
    """Where less is held it counts as half a step at least, as if nobody knew."""
    lacking = shape._replace(most_cached=1)
    known, unknown = load._replace(step_left_s=left_s), load._replace(step_left_s=None)
    assert not_less(cost(known, 0, lacking), cost(unknown, 0, lacking))


@given(st.floats(0, 1e3), st.floats(1e-3, 1), st.floats(0, 1e3))
def test_steps_follow_each_other_until_it_is_said_otherwise(
    boundary_at: float, step_s: float, later_s: float
) -> None:
    price = price_of(view())
    assert price is not None
    priced = price._replace(step_s=step_s, boundary_at=boundary_at)
    left_s, now = step_left_s(priced, boundary_at + later_s), boundary_at + later_s
    assert 0.0 <= left_s <= step_s
    steps = (now + left_s - boundary_at) / step_s
    assert math.isclose(steps, round(steps), abs_tol=1e-6)


@given(LOADS, SHAPES, st.floats(0, 1), st.floats(0, 1000), st.data())
def test_to_forget_what_is_missed_or_in_use_never_makes_it_more_attractive(
    load: LoadView, shape: RequestShape, regret: float, uses: float, data: st.DataObject
) -> None:
    hot = shape._replace(
        hot_tokens=data.draw(st.integers(0, shape.num_prompt_tokens - 1)),
        hot_share=data.draw(st.floats(0, 1)),
    )
    more = load._replace(regret=min(1.0, load.regret + regret))
    used = more._replace(uses_lost=load.uses_lost + uses)
    for asked in (shape, hot):
        assert not_less(cost(more, 0, asked), cost(load, 0, asked))
        assert not_less(cost(used, 0, asked), cost(more, 0, asked))


@given(LOADS, SHAPES, st.integers(0, 1000), st.integers(0, 10**6), st.floats(0, 1))
def test_more_sequences_context_or_memory_never_make_it_more_attractive(
    load: LoadView, shape: RequestShape, running: int, context: int, used: float
) -> None:
    busier = load._replace(
        num_running=load.num_running + running,
        context_tokens=load.context_tokens + context,
        used_fraction=min(1.0, load.used_fraction + used),
    )
    if load.num_running:
        assert not_less(cost(busier, 0, shape), cost(load, 0, shape))
    assert expected_time(Candidate(ReplicaId("r"), busier, 0, True), shape).decode_slowdown >= 1.0


@given(LOADS, SHAPES, st.data())
def test_more_match_never_makes_it_less_attractive(
    load: LoadView, shape: RequestShape, data: st.DataObject
) -> None:
    more = data.draw(st.integers(0, shape.num_prompt_tokens - 1))
    less = data.draw(st.integers(0, more))
    hot = shape._replace(
        hot_tokens=data.draw(st.integers(0, shape.num_prompt_tokens - 1)),
        hot_share=data.draw(st.floats(0, 1)),
    )
    for asked in (shape, hot):
        assert not_less(cost(load, less, asked), cost(load, more, asked))
    total = shape.num_prompt_tokens
    assert tuning_free(total - less, load.num_requests) >= tuning_free(total - more, load.num_requests)


@given(LOADS, SHAPES, st.data())
def test_costs_are_finite_and_positive_and_heat_never_adds_to_them(
    load: LoadView, shape: RequestShape, data: st.DataObject
) -> None:
    hot = shape._replace(
        hot_tokens=data.draw(st.integers(0, shape.num_prompt_tokens - 1)),
        hot_share=data.draw(st.floats(0, 1)),
    )
    cold_cost, hot_cost = cost(load, 0, shape), cost(load, 0, hot)
    assert math.isfinite(cold_cost)
    assert cold_cost > 0
    assert not_less(cold_cost, hot_cost)


FEW_MODELS = st.lists(MODELS, min_size=1, max_size=2)


@given(st.data(), FEW_MODELS)
def test_a_cost_is_the_same_whoever_else_is_weighed(data: st.DataObject, models: list[StepTimeModel]) -> None:
    """Replicas of one speed share what their prefill takes: worked out once for all of them."""
    model = st.sampled_from(models)
    typical = data.draw(st.none() | model)  # of the fleet: one
    loads = data.draw(st.lists(st.builds(_with_models, LOADS, model, st.just(typical)), max_size=6))
    length = data.draw(st.integers(1, 40_000))
    shape = RequestShape(
        length,
        data.draw(st.integers(0, length - 1)),
        data.draw(st.floats(2, 100)),
        data.draw(st.floats(0.01, 1)),
        data.draw(st.integers(0, length)),
    )
    held = st.sampled_from([0, length // 2, length - 1])
    candidates = [
        Candidate(ReplicaId(f"r{index}"), each, data.draw(held), True) for index, each in enumerate(loads)
    ]
    assert costs(candidates, shape) == [costs([candidate], shape)[0] for candidate in candidates]


def _with_models(load: LoadView, model: StepTimeModel, fleet_time: StepTimeModel | None) -> LoadView:
    return load._replace(step_time=model, fleet_time=fleet_time)
