"""A locust user that goes through one scenario's sessions, one after the other.

Beside locust's own row per scenario (the whole answer, ms) it keeps one for the time to first token and one
for the gaps between pieces; these two are left out of locust's total, which counts requests. A session that
gets a failed answer ends there, and the next one begins.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import ClassVar

import gevent  # type: ignore[import-untyped]
from locust import User, constant, task
from locust.env import Environment
from locust.exception import StopUser

from loadtest.client.answer import Answer
from loadtest.client.asking import Asker
from loadtest.client.endpoint import Endpoint
from loadtest.client.question import Question
from loadtest.scenarios.catalogue import make_scenario
from loadtest.scenarios.examples import SelfConsistency, is_refusal
from loadtest.scenarios.scenario import Ask, Scenario, Stopped
from loadtest.users.counts import Counts, failure_name

TTFT, GAP, ANSWER = "TTFT", "ITL", "POST"  # locust's column "Type"

COUNTS = Counts()  # this process's; greenlets of one thread
_numbers = count()


class AnswerFailed(Exception):
    """How locust's table of failures names it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the command line or the web page says, the same for all users of a process."""

    endpoint: Endpoint
    timeout_s: float
    scale: float
    pauses: float
    seed: int
    worker: int  # workers draw differently


class LlmUser(User):
    """Set `scenario_name`; the rest follows from the command line."""

    abstract = True
    wait_time = constant(1)  # between two sessions, seconds
    setting: ClassVar[Setting | None] = None  # None until a server was found; set on this class, for all
    scenario_name: ClassVar[str]
    # One per class, process and setting: it remembers what servers refuse.
    _scenario: ClassVar[tuple[Setting, Scenario] | None] = None

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._askers: list[Asker] = []
        self._number = next(_numbers)

    def on_start(self) -> None:
        if LlmUser.setting is None:
            return  # its first session ends it: here locust would take that for an error
        self._setting = LlmUser.setting
        self._rng = random.Random(
            f"{self._setting.seed} {self.scenario_name} {self._setting.worker} {self._number}"
        )

    def on_stop(self) -> None:
        for asker in self._askers:
            asker.close()

    @task
    def session(self) -> None:
        """From its first question to its last."""
        if LlmUser.setting is None:
            raise StopUser
        session_id = f"{self.scenario_name}-{self._rng.getrandbits(48):012x}"
        script = self._the_scenario().session(self._rng, session_id)
        answers: Sequence[Answer] | None = None
        while True:
            try:
                step = next(script) if answers is None else script.send(answers)
            except (StopIteration, Stopped):
                return
            answers = []
            if isinstance(step, Ask):
                answers = self._ask(step)
            else:
                gevent.sleep(step.seconds)

    def _the_scenario(self) -> Scenario:
        kind = type(self)
        if kind._scenario is None or kind._scenario[0] != self._setting:
            scenario = make_scenario(
                self.scenario_name, scale=self._setting.scale, pauses=self._setting.pauses
            )
            if isinstance(scenario, SelfConsistency):
                scenario = replace(scenario, on_vote=self._voted)
            kind._scenario = (self._setting, scenario)
        return kind._scenario[1]

    def _ask(self, step: Ask) -> list[Answer]:
        """All at once, each over a connection of its own."""
        while len(self._askers) < len(step.questions):
            self._askers.append(Asker(self._setting.endpoint, self._setting.timeout_s))
        asked = [
            gevent.spawn(self._ask_one, asker, question, step.may_refuse)
            for asker, question in zip(self._askers, step.questions, strict=False)
        ]
        try:
            gevent.joinall(asked, raise_error=True)
        finally:
            gevent.killall(asked)
        return [greenlet.value for greenlet in asked]

    def _ask_one(self, asker: Asker, question: Question, may_refuse: bool) -> Answer:
        answer = asker.ask(question)
        if not (may_refuse and is_refusal(answer)):
            self._tell(answer)
        return answer

    def _tell(self, answer: Answer) -> None:
        name, stats = self.scenario_name, self.environment.stats
        COUNTS.of(name).add(answer)
        error = None
        if answer.failure is not None:
            error = AnswerFailed(failure_name(answer))
        self.environment.events.request.fire(
            request_type=ANSWER,
            name=name,
            response_time=1e3 * answer.took_s,
            response_length=answer.output_tokens or 0,
            exception=error,
            context={},
        )
        if error is None and answer.ttft_s is not None:
            stats.get(name, TTFT).log(1e3 * answer.ttft_s, 0)
            gaps = stats.get(name, GAP)
            for gap_s in answer.gaps_s:
                gaps.log(1e3 * gap_s, 0)

    def _voted(self, winner: str, share: float) -> None:
        counts = COUNTS.of(self.scenario_name)
        counts.votes += 1
        counts.agreement += share
