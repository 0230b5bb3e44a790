"""What is sent to whom, and that each request's end is told once, with all its answers' tokens."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import HandedOver
from cache.events import RequestEnded
from cache.types import RequestId
from replica.engine.engine_core import EngineCore, Progress
from replica.engine.outbox import Outbox
from replica.engine.stream import DeltaStream, Parcel
from replica.errors import EngineStopped, ForwardFailed
from replica.scheduling.request import Request
from tests.fakes.engine import make_request, sim_core


class Loop:
    """An event loop whose turn comes at once, until it is closed."""

    is_closed = False

    def call_soon_threadsafe(self, deliver: Callable[[Parcel], None], parcel: Parcel) -> None:
        if self.is_closed:
            raise RuntimeError("Event loop is closed")
        deliver(parcel)


class Sent:
    """An outbox, the engine core that it serves, and what it has told."""

    def __init__(self) -> None:
        self.ended: list[RequestEnded] = []
        self.outbox = Outbox(0.0, self.ended.append)
        self.loop = Loop()
        self.core: EngineCore = sim_core(1024, max_running=64, max_waiting=1000)

    def open(self, name: str, *, n: int = 1, max_tokens: int = 4) -> tuple[DeltaStream, list[Request]]:
        asked = replace(make_request(name, range(8), max_tokens=max_tokens), n=n)
        stream = DeltaStream(cast("asyncio.AbstractEventLoop", self.loop), n)
        answers = self.core.take(asked)
        self.outbox.open(asked, answers, stream)
        return stream, answers

    def step(self) -> None:
        for progress in self.core.step():
            self.outbox.record(progress)

    def cancel(self, stream: DeltaStream) -> list[Request]:
        closed = self.outbox.close(stream)
        for request in closed:
            self.core.cancel(request.request_id)
        return closed


def end(name: str, num_tokens: int) -> RequestEnded:
    return RequestEnded(RequestId(name), 0, num_tokens)


def test_a_stream_that_closes_ends_all_its_answers_and_nobody_elses() -> None:
    sent = Sent()
    stream, answers = sent.open("left", n=3)
    other, _ = sent.open("other")
    sent.step()
    num_tokens = sum(answer.num_tokens_here for answer in answers)
    assert sent.outbox.close(stream) == answers
    assert sent.ended == [end("left", num_tokens)]
    assert sent.outbox.close(stream) == []
    assert sent.outbox.request_ids() == ["other"]
    assert not other.is_over


def test_closing_a_stream_costs_nothing_for_all_the_others() -> None:
    """A thousand clients that left at once, as behind a load balancer that goes, cost a million steps."""

    def cost(num_others: int) -> int:
        sent = Sent()
        stream, _ = sent.open("left", n=2)
        for number in range(num_others):
            sent.open(f"{number}")
        return num_instructions(lambda: sent.outbox.close(stream))

    assert cost(100) == cost(1)


def test_an_answer_that_fails_ends_those_beside_it() -> None:
    sent = Sent()
    stream, [failed, *others] = sent.open("r", n=3)
    assert sent.outbox.record(Progress(failed, error=ForwardFailed("it"))) == others
    assert sent.ended == [end("r", 0)]
    sent.outbox.deliver()
    assert stream.is_over


@pytest.mark.parametrize("sends_rest", [False, True])
async def test_whoever_is_here_when_all_ends_has_an_error_and_its_end_told(*, sends_rest: bool) -> None:
    sent = Sent()
    stream, [request] = sent.open("r")
    (progress,) = sent.core.step()
    sent.outbox.record(progress)
    assert sent.outbox.close_all(HandedOver, sends_rest=sends_rest) == [request]
    assert sent.ended == [end("r", 1)]
    assert sent.outbox.request_ids() == []
    sent.outbox.deliver()
    if sends_rest:
        assert (await stream.next()).token_ids == tuple(request.token_ids[-1:])
    with pytest.raises(HandedOver):
        await stream.next()


def test_who_reads_on_a_loop_that_is_closed_has_gone() -> None:
    sent = Sent()
    _, [request] = sent.open("r")
    sent.loop.is_closed = True
    sent.step()
    sent.outbox.send_due(0.0, 0.0)
    assert sent.outbox.deliver() == [request]
    assert sent.ended == [end("r", 1)]


@pytest.mark.parametrize("leaves", [False, True])
def test_two_of_one_name_are_told_apart_while_the_first_has_not_been_told_of_its_end(*, leaves: bool) -> None:
    """The second took the first one's place, and whoever read the first waited for ever."""
    sent = Sent()
    asked = make_request("r", range(8), output=range(4), max_tokens=4)  # an earlier attempt said it all
    first, second = [DeltaStream(cast("asyncio.AbstractEventLoop", sent.loop)) for _ in range(2)]
    for request, stream in ((asked, first), (make_request("r", range(8)), second)):
        sent.outbox.open(request, sent.core.take(request), stream)
    if leaves:
        assert sent.cancel(first) == []
    while sent.core.has_work:
        sent.step()
    sent.outbox.deliver()
    assert (first.is_over, second.is_over) == (not leaves, True)
    assert sent.ended == [end("r", 0), end("r", 4)]


@given(st.lists(st.sampled_from(("ask", "ask three", "cancel", "step", "step")), max_size=20), st.booleans())
def test_each_request_is_told_as_ended_once_with_what_was_computed_for_it(
    acts: list[str], hands_over: bool
) -> None:
    sent, asked = Sent(), dict[str, tuple[DeltaStream, list[Request]]]()
    for act in acts:
        match act:
            case "ask" | "ask three":
                name = f"{len(asked)}"
                asked[name] = sent.open(name, n=1 if act == "ask" else 3, max_tokens=1 + len(asked) % 3)
            case "cancel" if asked:
                sent.cancel(asked[f"{len(asked) // 2}"][0])
            case "step":
                sent.step()
    while not hands_over and sent.core.has_work:
        sent.step()
    sent.outbox.close_all(lambda: EngineStopped("it was closed"), sends_rest=False)
    assert sent.outbox.request_ids() == []
    assert sorted(sent.ended, key=lambda told: int(told.request_id)) == [
        end(name, sum(answer.num_tokens_here for answer in answers)) for name, (_, answers) in asked.items()
    ]


def num_instructions(act: Callable[[], object]) -> int:
    """Of Python's own that it takes: what a clock would say, on any machine."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count
