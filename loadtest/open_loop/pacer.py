"""Sends each request when it is due, however slow the answers are, and tells how late it was itself.

A client that falls behind its schedule measures itself: so lateness is a result, never a silence. Knows
clocks and schedules; how a question is asked comes in by argument.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from loadtest.client.answer import Answer
from loadtest.client.question import Question
from loadtest.open_loop.schedule import Arrival
from loadtest.open_loop.tally import Tally

Ask = Callable[[Question], Awaitable[Answer]]
MakeQuestion = Callable[[Arrival], Question]
_BEGIN_S = 0.05  # the first question is made before its time comes
_LEAVE_S = 0.001  # for who was sent to be on the wire before the next question keeps the loop busy


class Pacer:
    """One run. `in_flight` and `num_sent` may be read while it runs."""

    def __init__(
        self,
        ask: Ask,
        make: MakeQuestion,
        tally: Tally,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._ask, self._make, self._tally = ask, make, tally
        self._clock, self._sleep = clock, sleep
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_sent = 0

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    async def run(self, arrivals: Iterable[Arrival]) -> None:
        """Until the last answer. Raises what `ask` raises, once the others were cancelled; so does
        cancelling this: the tally then holds what was answered until then."""
        began_s = self._clock() + _BEGIN_S
        watch = asyncio.create_task(self._watch(began_s))
        try:
            for arrival in arrivals:
                due_s = began_s + arrival.due_s
                await self._until(min(due_s, self._clock() + _LEAVE_S))
                # While nobody waits for it: before the sleep that ends with its sending.
                question = self._make(arrival)
                await self._until(due_s)
                self._send(arrival, question, began_s)
                self._raise_failed()
            while self._tasks:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                self._raise_failed()
        finally:
            for task in (watch, *self._tasks):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(watch, *self._tasks, return_exceptions=True)

    async def _until(self, due_s: float) -> None:
        # Once even if it is due: answers are to be read also by a client that is behind.
        await self._sleep(max(0.0, due_s - self._clock()))

    def _send(self, arrival: Arrival, question: Question, began_s: float) -> None:
        self.num_sent += 1
        self._tasks.add(asyncio.create_task(self._ask_one(arrival.due_s, began_s, question)))

    async def _ask_one(self, due_s: float, began_s: float, question: Question) -> None:
        # Here and not in `_send`: a loop that is busy lets a task begin late, and that is lateness too.
        late_s = max(0.0, self._clock() - began_s - due_s)
        self._tally.sent(due_s, late_s)
        answer = await self._ask(question)
        self._tally.answered(due_s, late_s, answer)

    def _raise_failed(self) -> None:
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            task.result()

    async def _watch(self, began_s: float) -> None:
        """Once a second: how many are on their way."""
        second = 0
        while True:
            await self._sleep(max(0.0, began_s + second + 1 - self._clock()))
            self._tally.seen(second, sum(not task.done() for task in self._tasks))
            second += 1
