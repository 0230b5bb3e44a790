"""Carries a plan out: start, warm, run every cell, search, stop; the next contender; and again.

Ctrl-C ends it with what was measured until then. Knows the order of things; measures nothing itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from loadtest.client.answer import Failure
from loadtest.client.endpoint import Endpoint
from loadtest.comparison.contender import Contender
from loadtest.comparison.errors import NoAnswers
from loadtest.comparison.load import Load, Look, Sent, is_met, send
from loadtest.comparison.plan import Cell, Plan, Search
from loadtest.comparison.rate_search import RateSearch
from loadtest.comparison.results import Found, Results, Run
from loadtest.open_loop.calibration import tokens_per_word
from loadtest.open_loop.ceiling import infinite_cache_hit_ratio
from loadtest.open_loop.open_files import check_files
from loadtest.open_loop.prompts import PromptMaker, TextPrompts, TokenPrompts
from loadtest.open_loop.schedule import Arrival, schedule, shortened
from loadtest.workloads.load import at_rate

_WARM_REQUESTS = 24  # enough for engines to have met prompts of every length, and to have timed their steps
_WARM_PER_S = 4.0

Start = Callable[[Contender], AbstractContextManager[str]]  # a server's address, inside it


class Observer:
    """What happens, for a terminal; this one is silent."""

    def starting(self, contender: str, repeat: int) -> None: ...

    def running(self, contender: str, cell: Cell, num_counted: int) -> Look:
        return lambda tally, num_sent, in_flight: None

    def finished(self, run: Run) -> None: ...

    def found(self, found: Found) -> None: ...


@dataclass(slots=True)
class Experiment:
    """One plan on its way. `results` is there at any time."""

    plan: Plan
    start: Start
    observer: Observer
    conditions: dict[str, str]
    _runs: list[Run] = field(default_factory=list)
    _found: list[Found] = field(default_factory=list)
    _was_stopped: bool = False
    _ended_by: str = ""

    def run(self) -> Results:
        """Raises DeploymentFailed, NoAnswers, ClientError or WorkloadError; `results` has what ran before,
        whatever is raised."""
        try:
            for repeat, contender in self.plan.order():
                self.observer.starting(contender.label, repeat)
                with self.start(contender) as url:
                    self._visit(contender, repeat, Endpoint.find(url))
        except KeyboardInterrupt:
            self._was_stopped = True
        except Exception as error:
            self._ended_by = (str(error) or type(error).__name__).partition("\n")[0]
            raise
        return self.results

    @property
    def results(self) -> Results:
        return Results(
            conditions=self.conditions,
            contenders=tuple(contender.label for contender in self.plan.contenders),
            engines={contender.label: contender.engine for contender in self.plan.contenders},
            targets=self.plan.targets,
            runs=tuple(self._runs),
            found=tuple(self._found),
            was_stopped=self._was_stopped,
            ended_by=self._ended_by,
        )

    def _visit(self, contender: Contender, repeat: int, endpoint: Endpoint) -> None:
        """Everything that one contender does in one repeat, on a server that has just started."""
        visit = _Visit(self.plan, contender, repeat, endpoint)
        visit.warm()
        for number, cell in enumerate(self.plan.cells):
            self._measure(visit, cell, "fixed", f"cell {number}")
        for number, search in enumerate(self.plan.searches):
            self._search(visit, search, f"search {number}")

    def _search(self, visit: _Visit, search: Search, name: str) -> None:
        first = self._found_before(visit.contender.label, search) or search.first_per_s
        rates = RateSearch(first, precision=search.precision)
        while (rate := rates.next_rate()) is not None:
            rates.tell(rate, is_met=self._holds(visit, search, rate, name))
        found = Found(visit.contender.label, search.workload.label, visit.repeat, rates.found_per_s)
        self._found.append(found)
        self.observer.found(found)

    def _holds(self, visit: _Visit, search: Search, rate_per_s: float, name: str) -> bool:
        """Whether one of the attempts at this rate keeps the targets. No prompt is sent twice."""
        for attempt in range(search.attempts):
            cell = search.cell(rate_per_s)
            run = self._measure(visit, cell, "search", f"{name} {rate_per_s} {attempt}")
            if is_met(run.tally) and run.is_whole:
                return True
        return False

    def _found_before(self, contender: str, search: Search) -> float | None:
        """A repeat begins where the one before it ended: the same end, sooner."""
        known = [
            found.rate_per_s
            for found in self._found
            if (found.contender, found.workload) == (contender, search.workload.label) and found.rate_per_s
        ]
        return known[-1] if known else None

    def _measure(self, visit: _Visit, cell: Cell, kind: str, name: str) -> Run:
        load, ceiling = visit.load(cell, name, ends_when_lost=kind == "search")
        look = self.observer.running(visit.contender.label, cell, load.num_counted)
        sent = send(visit.endpoint, load, look)
        run = Run(
            contender=visit.contender.label,
            workload=cell.workload.label,
            rate_per_s=cell.rate_per_s,
            repeat=visit.repeat,
            seed=visit.seed,
            kind="search" if kind == "search" else "fixed",
            ceiling=ceiling,
            tally=sent.tally,
            is_whole=sent.is_whole,
            was_stopped=sent.was_interrupted,
        )
        if sent.tally.answers:
            self._runs.append(run)
        if sent.was_interrupted:
            raise KeyboardInterrupt
        _require_answers(run)
        self.observer.finished(run)
        return run


@dataclass(frozen=True, slots=True)
class _Visit:
    """One contender's server in one repeat. Everybody is asked the same in the same repeat."""

    plan: Plan
    contender: Contender
    repeat: int
    endpoint: Endpoint

    @property
    def seed(self) -> int:
        return self.plan.seed + self.repeat

    def warm(self) -> None:
        """Asks what nothing later repeats. Raises NoAnswers."""
        load, _ = self.load(_warming(self.plan), "warm", ends_when_lost=False)
        sent = send(self.endpoint, replace(load, counted_from_s=0.0), lambda *_: None)
        if sent.was_interrupted:
            raise KeyboardInterrupt
        _require(sent, f"{self.contender.label}, warming")

    def load(self, cell: Cell, name: str, *, ends_when_lost: bool) -> tuple[Load, float]:
        """What to send, and the hit ratio of an infinite cache on what counts of it."""
        block_tokens, arrivals = _window(self.plan, cell, self.seed)
        from_s = arrivals[min(cell.num_warming, len(arrivals) - 1)].due_s
        # A trace's clock may tick: whoever is due at that instant counts, and so for the ceiling.
        first = bisect_left(arrivals, from_s, key=lambda arrival: arrival.due_s)
        salt = f"{cell.workload.label} {self.seed} {name}"
        load = Load(
            arrivals=arrivals,
            prompts=self._prompts(block_tokens, salt),
            targets=self.plan.targets,
            counted_from_s=from_s,
            salt=salt,
            ends_when_lost=ends_when_lost,
            num_replicas=self.contender.num_replicas,
        )
        return load, _ceiling(arrivals, block_tokens, first)

    def _prompts(self, block_tokens: int, salt: str) -> PromptMaker:
        if not self.plan.uses_text:
            return TokenPrompts(block_tokens, salt)
        return TextPrompts(block_tokens, salt, tokens_per_word=tokens_per_word(self.endpoint))


def check_windows(plan: Plan) -> None:
    """Before anything starts: what will be sent can be made, and sent. Raises WorkloadError, BadRequest.

    Of a search only the first rate: the others are not known before it.
    """
    cells = [_warming(plan), *plan.cells, *(search.cell(search.first_per_s) for search in plan.searches)]
    for repeat in range(plan.repeats):
        for cell in cells:
            _, arrivals = _window(plan, cell, plan.seed + repeat)
            check_files(arrivals)


def _warming(plan: Plan) -> Cell:
    cell = plan.cells[0] if plan.cells else plan.searches[0].cell(_WARM_PER_S)
    return replace(cell, rate_per_s=_WARM_PER_S, seconds=_WARM_REQUESTS / _WARM_PER_S)


def _window(plan: Plan, cell: Cell, seed: int) -> tuple[int, list[Arrival]]:
    """Tokens of a block, and who arrives when. Raises WorkloadError."""
    workload = at_rate(cell.workload.open(), cell.rate_per_s, num_requests=cell.num_requests, seed=seed)
    arrivals = shortened(schedule(workload), max_tokens=plan.max_context, max_output=None)
    return workload.block_tokens, arrivals


def _ceiling(arrivals: list[Arrival], block_tokens: int, first: int) -> float:
    return infinite_cache_hit_ratio(
        [arrival.request for arrival in arrivals], block_tokens, counted_from=first
    )


def _require_answers(run: Run) -> None:
    what = f"{run.contender}, {run.workload} at {run.rate_per_s:g}/s"
    # A try that is given up may have had no answer yet; from a server that is gone none would come.
    if run.is_whole or run.tally.failures.keys() == {Failure.UNREACHABLE}:
        _require(Sent(run.tally, is_whole=True), what)


def _require(sent: Sent, what: str) -> None:
    """A server that answers nothing is no slow server. Raises NoAnswers."""
    if not sent.tally.answers:
        told = "; ".join(
            f"{kind} ({number}): {' | '.join(sent.tally.problems.get(kind, ())[:2])}"
            for kind, number in sent.tally.failures.items()
        )
        raise NoAnswers(what, sent.tally.due, told)
