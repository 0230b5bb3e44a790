"""Who goes on before anybody has seen what the present step draws."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cache.messages import SamplingParams
from cache.scheduling_order import SchedulingOrder
from replica.output.logprob_log import LogprobLog
from replica.scheduling.going_on import going_on
from replica.scheduling.request import Request
from tests.fakes.scheduling import Engine, Job


def a_request(number: int = 0, num_prompt: int = 8, num_output: int = 5) -> Request:
    engine = Engine(SchedulingOrder.FIRST_COME)
    return engine.submit(number, Job(0.0, num_prompt=num_prompt, num_output=num_output))


def drawing(sampling: SamplingParams) -> Request:
    request = a_request()
    request.sampling = sampling
    return request


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(5, temperature=0.0),
        SamplingParams(5, temperature=1.0, top_p=0.9),
        SamplingParams(5, temperature=0.7, top_k=20, min_p=0.1),
        SamplingParams(5, logit_bias=((3, 1.0),)),
    ],
)
def test_whoever_draws_from_this_steps_logits_alone_goes_on(sampling: SamplingParams) -> None:
    request = drawing(sampling)
    found = going_on([(request, 8)])
    assert found is not None
    assert found.decodes == [request]


def test_a_prompt_goes_on_where_it_stands_and_a_last_token_not_at_all() -> None:
    long, last = a_request(1, num_prompt=40), a_request(2, num_output=1)
    found = going_on([(long, 16), (last, 8)])
    assert found is not None
    assert (found.decodes, found.prompts) == ([], [(long, 16)])


def with_log_probabilities(request: Request) -> None:
    request.logprobs = LogprobLog(0)


def with_another_answer(request: Request) -> None:
    request.followers.append(a_request(1))


def with_a_penalty(request: Request) -> None:
    request.sampling = SamplingParams(5, repetition_penalty=1.2)


@pytest.mark.parametrize("change", [with_log_probabilities, with_another_answer, with_a_penalty])
def test_one_that_has_to_be_seen_first_stops_everybody(change: Callable[[Request], None]) -> None:
    seen, other = a_request(1), a_request(2)
    change(seen)
    assert going_on([(other, 8), (seen, 8)]) is None
