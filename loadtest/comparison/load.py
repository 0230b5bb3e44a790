"""One run against one server: a workload's window at a rate, sent by the clock, tallied.

Knows endpoints and workloads; knows neither contenders nor reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.client.asking import AsyncAsker
from loadtest.client.endpoint import Endpoint
from loadtest.client.question import Question, completion
from loadtest.open_loop.open_files import make_room
from loadtest.open_loop.pacer import Pacer
from loadtest.open_loop.prompts import PromptMaker
from loadtest.open_loop.schedule import Arrival
from loadtest.open_loop.tally import Tally, Targets

_LOOK_S = 0.25  # how often progress is told
GOOD_SHARE = 0.99  # of requests must keep the targets: a p99


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, and what of it counts."""

    arrivals: Sequence[Arrival]
    prompts: PromptMaker
    targets: Targets
    counted_from_s: float = 0.0
    salt: str = ""  # of session names
    ignore_eos: bool = True  # answers are as long as the workload says, not as the model likes
    ends_when_lost: bool = False  # a search needs no more than to know that the targets are missed
    timeout_s: float = 300.0
    num_replicas: int = 0  # of the server; 0 = unknown

    @property
    def num_counted(self) -> int:
        return sum(arrival.due_s >= self.counted_from_s for arrival in self.arrivals)

    def question(self, arrival: Arrival) -> Question:
        more = {"ignore_eos": True} if self.ignore_eos else {}
        question = completion(
            self.prompts.prompt(arrival.request),
            max_tokens=arrival.request.output_tokens,
            session=f"{self.salt}-{arrival.request.session}",
            temperature=0.0,
            **more,
        )
        return question if arrival.n == 1 else question.with_choices(arrival.n)


@dataclass(frozen=True, slots=True)
class Sent:
    """How a run ended. is_whole: False if it was stopped, by Ctrl-C or because its targets were lost."""

    tally: Tally
    is_whole: bool
    was_interrupted: bool = False


Look = Callable[[Tally, int, int], None]  # the tally so far, requests sent, requests in flight


def is_met(tally: Tally) -> bool:
    """Enough requests kept the targets; what failed did not."""
    return bool(tally.due) and tally.good >= GOOD_SHARE * tally.due


def is_lost(tally: Tally, num_counted: int) -> bool:
    """Whatever still comes, `is_met` will not hold."""
    bad = tally.num_failed + tally.answers - tally.good
    return num_counted - bad < GOOD_SHARE * num_counted


def send(endpoint: Endpoint, load: Load, look: Look) -> Sent:
    """Blocks until the last answer. Ctrl-C ends it early, and what was answered is kept."""
    make_room(load.arrivals)
    tally = Tally(targets=load.targets, counted_from_s=load.counted_from_s, num_replicas=load.num_replicas)
    ended = _Ended()
    try:
        asyncio.run(_run(endpoint, load, tally, look, ended))
    except KeyboardInterrupt:
        return Sent(tally, is_whole=False, was_interrupted=True)
    return Sent(tally, is_whole=not ended.was_lost)


@dataclass(slots=True)
class _Ended:
    was_lost: bool = False


async def _run(endpoint: Endpoint, load: Load, tally: Tally, look: Look, ended: _Ended) -> None:
    num_counted = load.num_counted
    async with AsyncAsker(endpoint, load.timeout_s) as asker:
        pacer = Pacer(asker.ask, load.question, tally)
        running = asyncio.create_task(pacer.run(load.arrivals))
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=_LOOK_S)
                look(tally, pacer.num_sent, pacer.in_flight)
                if load.ends_when_lost and is_lost(tally, num_counted):
                    ended.was_lost = True
                    return
            running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
