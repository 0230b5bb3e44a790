"""Requests leave when due whatever becomes of earlier ones; lateness is told; an end loses nothing."""

from __future__ import annotations

import asyncio
import time

import pytest

from loadtest.client.answer import Answer, Failure
from loadtest.client.question import Question, completion
from loadtest.open_loop.pacer import Pacer
from loadtest.open_loop.schedule import Arrival
from loadtest.open_loop.tally import Tally
from loadtest.workloads.request import WorkRequest

WHOLE = Answer(0.0, 0.1, 0.1, (), 8, 0, 1, "a", ("stop",), ("x",), 200)


def arrivals(*due_s: float) -> list[Arrival]:
    return [Arrival(each, WorkRequest(each, 8, 1, (0,), 0)) for each in due_s]


def make(arrival: Arrival) -> Question:
    return completion("x", max_tokens=1)


async def test_nobody_waits_for_an_earlier_answer() -> None:
    """The first answer comes only once all have been sent."""
    tally, all_sent = Tally(), asyncio.Event()

    async def ask(question: Question) -> Answer:
        if tally.due == 5:
            all_sent.set()
        await all_sent.wait()
        return WHOLE

    await asyncio.wait_for(Pacer(ask, make, tally).run(arrivals(0.0, 0.0, 0.01, 0.01, 0.02)), 30)
    assert (tally.due, tally.answers) == (5, 5)


async def test_a_client_that_is_slow_itself_says_so() -> None:
    tally = Tally()

    def slow(arrival: Arrival) -> Question:
        time.sleep(0.1)
        return make(arrival)

    async def ask(question: Question) -> Answer:
        return WHOLE

    await Pacer(ask, slow, tally).run(arrivals(0.0, 0.0, 0.0))
    assert tally.late.largest_s >= 0.2  # three times 0.1 s of work, of which the first has 0.05 s of grace
    assert tally.ttft.largest_s >= tally.late.largest_s


async def test_the_time_that_the_next_question_takes_to_make_is_nobodys_silence() -> None:
    """Sent is when asking begins: told lateness is that of the request on the wire, to the clock's grain."""
    tally, asked_s = Tally(), []

    def slow(arrival: Arrival) -> Question:
        time.sleep(0.1)
        return make(arrival)

    async def ask(question: Question) -> Answer:
        asked_s.append(time.perf_counter())
        return WHOLE

    due_s = (0.2, 0.25, 1.0)
    earliest_s = time.perf_counter()
    await Pacer(ask, slow, tally).run(arrivals(*due_s))
    began_s = earliest_s + 0.05  # or a moment later, which makes what is seen here the larger one
    seen_s = [at_s - began_s - each for at_s, each in zip(asked_s, due_s, strict=True)]
    assert tally.late.total_s >= sum(max(0.0, each) for each in seen_s) - 0.03
    assert tally.late.quantile_s(0.3) < 0.05  # who has been sent does not wait for the next to be made


async def test_a_failed_answer_is_counted_and_a_bug_is_raised() -> None:
    tally = Tally()

    async def refuse(question: Question) -> Answer:
        return Answer(0, 0, None, (), None, None, None, None, (), (), 429, Failure.BUSY, "later")

    await Pacer(refuse, make, tally).run(arrivals(0.0))
    assert tally.failures == {"refused as busy": 1}

    async def broken(question: Question) -> Answer:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Pacer(broken, make, Tally()).run(arrivals(0.0, 0.1))


async def test_what_was_answered_before_an_end_is_kept_and_the_rest_is_cancelled() -> None:
    tally, cancelled = Tally(), []

    async def ask(question: Question) -> Answer:
        if tally.due == 1:
            return WHOLE
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(question)
            raise
        return WHOLE

    pacer = Pacer(ask, make, tally)
    running = asyncio.create_task(pacer.run(arrivals(0.0, 0.01, 600.0)))
    while pacer.num_sent < 2 or not tally.answers:  # noqa: ASYNC110  # a pacer is asked, it does not tell
        await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (tally.answers, len(cancelled), pacer.in_flight) == (1, 1, 1)
