"""How steps follow one another: each after the last one's tokens are known, or begun while that is computed.

    one by one     plan 1 | compute 1 | look at 1, plan 2 | compute 2 | look at 2, ..
    one ahead      plan 1 | compute 1           | compute 2           | compute 3
                          | plan 2, begin it    | look at 1, begin 3  | look at 2, ..

Both are driven alike: `next` opens a step in the schedule, `compute` gives its tokens. Knows the schedule,
blocks and a runner; knows neither what tokens mean nor who hears of them. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cache.errors import ConfigError
from cache.kv_cache_manager import KVCacheManager
from cache.types import RequestId
from replica.errors import InvalidLogits
from replica.scheduling.going_on import NextPart
from replica.scheduling.request import RequestState
from replica.scheduling.runner import LaunchedStep, LaunchingRunner, Runner, ScheduledSequence, StepResult
from replica.scheduling.scheduler import Scheduler


class Pipeline(Protocol):
    """The engine's steps, in turn: `next`, then `compute` or `drop`."""

    num_begun_ahead: int  # steps, since the start
    num_wasted: int  # tokens of those that nobody wanted any more

    def next(self) -> list[ScheduledSequence]:
        """Open the next step in the schedule and take its blocks; empty if there is nothing to do."""

    def compute(self) -> StepResult:
        """Of the step that is open. Raises what the runner raises: `drop` it then."""

    def drop(self) -> None:
        """Nothing of the open step counts, nor of one that was begun after it: it fails, or is taken back."""


def pipeline(wanted: bool | str, scheduler: Scheduler, cache: KVCacheManager, runner: Runner) -> Pipeline:
    """wanted: `ReplicaConfig.async_scheduling`. Raises ConfigError where the runner cannot do it."""
    launches = isinstance(runner, LaunchingRunner)
    if wanted is True and not launches:
        raise ConfigError(
            "async_scheduling", wanted, "must be false or auto: this runner takes no step ahead"
        )
    is_card = runner.info.device.startswith("cuda")
    if isinstance(runner, LaunchingRunner) and (wanted is True or (wanted == "auto" and is_card)):
        return OneAhead(scheduler, cache, runner)
    return OneByOne(scheduler, runner)


class OneByOne:
    """Each step is planned when all is known of the one before."""

    num_begun_ahead = num_wasted = 0

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._open: list[ScheduledSequence] = []

    def next(self) -> list[ScheduledSequence]:
        self._open = self._scheduler.schedule()
        return self._open

    def compute(self) -> StepResult:
        return self._runner.execute(self._open)

    def drop(self) -> None:
        self._open = []


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step that the runner has."""

    launched: LaunchedStep
    place_by_id: dict[RequestId, int]  # of its sequences


@dataclass(frozen=True, slots=True)
class _Ahead:
    """One that the runner has before it is open, and what it is of."""

    begun: _Begun
    parts: list[NextPart]


class OneAhead:
    """Where the next step can be said before the present one is done (`going_on.py`), the runner has it by
    then. Whose answer has ended meanwhile is left out of it when its turn comes; the rest is as planned."""

    def __init__(self, scheduler: Scheduler, cache: KVCacheManager, runner: LaunchingRunner) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._runner = runner
        self._open: list[ScheduledSequence] = []
        self._begun: _Begun | None = None  # the open step, where the runner has it
        self._following: list[NextPart] = []  # the step after it, with room for its tokens
        self._ahead: _Ahead | None = None
        self._num_unseen = 0  # steps in a row that were begun ahead
        self.num_begun_ahead = self.num_wasted = 0

    def next(self) -> list[ScheduledSequence]:
        self._begun = None
        self._open = self._go_on()
        if self._begun is None:
            self._num_unseen = 0
            self._open = self._scheduler.schedule()
        self._following = self._with_room(self._scheduler.parts_after(unseen=self._num_unseen))
        return self._open

    def compute(self) -> StepResult:
        """The next step is begun before this one's result is waited for."""
        begun = self._begun or self._launch(self._open)
        if self._following:
            self._ahead = self._launch_ahead(begun)
        self._begun = None
        places = [begun.place_by_id[each.request_id] for each in self._open]
        try:
            return _part(begun.launched.result(), places)
        except InvalidLogits as error:
            raise error.at({begun_at: place for place, begun_at in enumerate(places)}) from None

    def drop(self) -> None:
        self._open, self._begun, self._following, self._ahead = [], None, [], None

    # -- parts of the above -----------------------------------------------------------------------

    def _go_on(self) -> list[ScheduledSequence]:
        """Open the step that was begun ahead, for those who are still here."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return []
        here = [part for part in ahead.parts if part.request.state is RequestState.RUNNING]
        if len(here) < len(ahead.parts):
            begun, kept = (sum([part.num_tokens for part in parts]) for parts in (ahead.parts, here))
            self.num_wasted += begun - kept
        if not here:
            return []
        self._begun = ahead.begun
        self._num_unseen += 1
        return self._scheduler.go_on(here)

    def _with_room(self, parts: list[NextPart]) -> list[NextPart]:
        """All of them, with blocks for their tokens; none, if these do not fit."""
        sizes = [(part.request.blocks, part.start + part.num_tokens) for part in parts]
        needed = sum([max(0, self._cache.new_blocks(size) - len(held.block_table)) for held, size in sizes])
        if needed > self._cache.num_free:
            return []
        for held, size in sizes:
            self._cache.reserve(held, size)
        return parts

    def _launch(self, sequences: list[ScheduledSequence], before: LaunchedStep | None = None) -> _Begun:
        places = {each.request_id: place for place, each in enumerate(sequences)}
        return _Begun(self._runner.launch(sequences, before), places)

    def _launch_ahead(self, begun: _Begun) -> _Ahead:
        sequences = [
            ScheduledSequence(
                request_id=part.request.request_id,
                token_ids=part.request.token_ids,
                block_table=part.request.blocks.block_table,
                start=part.start,
                num_new_tokens=part.num_tokens,
                num_prompt_tokens=part.request.num_prompt_tokens,
                sampling=part.request.sampling,
                seed=part.request.seed,
                drawn_by=begun.place_by_id[part.request.request_id] if part.is_drawn else None,
            )
            for part in self._following
        ]
        self.num_begun_ahead += 1
        return _Ahead(self._launch(sequences, begun.launched), self._following)


def _part(result: StepResult, places: Sequence[int]) -> StepResult:
    """What it says of some of its sequences, as if they had been all: of a step in which nobody asked for log
    probabilities."""
    if len(places) == len(result.next_tokens):
        return result
    assert not result.logprobs
    assert not result.prompt_logprobs
    return replace(result, next_tokens=tuple([result.next_tokens[place] for place in places]))
