"""The measurements, one result after the other, in the order of the plan. Knows contenders; knows no files.

What fails is a result too, with its reason: time on a card is short, and the rest is still worth having. But
where the card is lost to the process the rest would fail for that alone: it is left to another process.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

import torch

from benchmarks.cases import random_prompts, with_shared_prefix
from benchmarks.contender import Contender, Job, Run
from benchmarks.gpu import contenders, correctness, limits, work
from benchmarks.gpu.plan import BACKENDS, UNRECORDED, Decode, Plan, Prefill
from benchmarks.gpu.sheet import Result
from benchmarks.transformers_engines import Generate
from replica.runners.lost_card import is_lost

CARD = "card"
LIMITS, KERNEL, TOKENS, PREFILL, DECODE, FIRST = (
    "limits",
    "attention error",
    "greedy tokens",
    "prefill",
    "decode",
    "first token",
)
Key = tuple[str, str, str]  # section, case, contender
LIMITS_KEY: Key = (LIMITS, "", CARD)


@dataclass(frozen=True, slots=True)
class Task:
    """One result to be had."""

    section: str
    case: str
    contender: str
    measure: Callable[[Contender | None], Result]

    @property
    def key(self) -> Key:
        return self.section, self.case, self.contender


class Bench:
    """A plan on a device. is_done: whether the sheet has this result."""

    def __init__(
        self,
        plan: Plan,
        names: tuple[str, ...],
        device: torch.device,
        dtype: torch.dtype,
        *,
        is_done: Callable[[Key], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._names, self._device, self._dtype = plan, names, device, dtype
        self._is_done, self._clock = is_done, clock
        self._itemsize = dtype.itemsize
        self._is_lost = False  # the card, to this process
        reasons = {name: contenders.why_absent(name, plan, device, dtype) for name in names}
        self.absent = {name: reason for name, reason in reasons.items() if reason is not None}

    @property
    def keys(self) -> frozenset[Key]:
        """Of the results to be had of whoever is named and here."""
        present = [name for name in self._names if name not in self.absent]
        return frozenset([LIMITS_KEY, *(task.key for name in present for task in self._tasks(name))])

    def results(self, end_s: float) -> Iterator[Result]:
        """All that are not done yet. Starts nothing after `end_s` of the clock, or once the card is lost."""
        if not self._is_done(LIMITS_KEY):
            yield self._limits()
        for name in self._names:
            waiting = [task for task in self._tasks(name) if not self._is_done(task.key)]
            if waiting and name not in self.absent and self._goes_on(end_s):
                yield from self._of_contender(name, waiting, end_s)

    def _of_contender(self, name: str, waiting: list[Task], end_s: float) -> Iterator[Result]:
        # What needs no model comes first, while its memory is free.
        yield from self._of_tasks([each for each in waiting if each.section == KERNEL], None, end_s)
        rest = [each for each in waiting if each.section != KERNEL]
        if not rest or not self._goes_on(end_s):
            return
        try:
            with contenders.running(name, self._plan, self._device, self._dtype) as contender:
                yield from self._of_tasks(rest, contender, end_s)
        except Exception as error:
            if self._is_lost:
                return  # not even its memory could be given back
            self._is_lost = is_lost(self._device)
            # It could not even start.
            yield from (_missing(task, _told(error)) for task in rest if not self._is_done(task.key))

    def _of_tasks(self, tasks: list[Task], contender: Contender | None, end_s: float) -> Iterator[Result]:
        for task in tasks:
            if self._goes_on(end_s):
                yield self._measured(task, contender)

    def _goes_on(self, end_s: float) -> bool:
        return not self._is_lost and self._clock() < end_s

    def _measured(self, task: Task, contender: Contender | None) -> Result:
        try:
            return task.measure(contender)
        except Exception as error:
            self._is_lost = is_lost(self._device)
            return _missing(task, _told(error))

    # -- what is measured ---------------------------------------------------------------------------

    def _limits(self) -> Result:
        plan = self._plan
        found = limits.measure(self._device, self._dtype, matrix=plan.matrix, copied_bytes=plan.copied_bytes)
        values = {"operations_per_s": found.operations_per_s, "bytes_per_s": found.bytes_per_s}
        return Result(LIMITS, "", CARD, values=values)

    def _tasks(self, name: str) -> list[Task]:
        plan, tasks = self._plan, []
        if name in BACKENDS and name != UNRECORDED:
            tasks += [
                Task(KERNEL, case, name, lambda _, case=case: self._error(name, case))  # type: ignore[misc]
                for case in correctness.steps(plan.first_token)
            ]
        tasks.append(Task(TOKENS, f"{plan.correct_tokens}", name, lambda c: self._tokens(name, _given(c))))
        tasks += [
            Task(DECODE, label(case), name, lambda c, case=case: self._decode(name, case, _given(c)))  # type: ignore[misc]
            for case in plan.decodes
        ]
        tasks += [
            Task(PREFILL, label(case), name, lambda c, case=case: self._prefill(name, case, _given(c)))  # type: ignore[misc]
            for case in plan.prefills
        ]
        ratios = (0.0, *plan.hit_ratios) if name in BACKENDS else (0.0,)
        tasks += [
            Task(FIRST, hit_label(r), name, lambda c, r=r: self._first_token(name, r, _given(c)))  # type: ignore[misc]
            for r in ratios
        ]
        return tasks

    def _error(self, name: str, case: str) -> Result:
        pieces = correctness.steps(self._plan.first_token)[case]
        error = correctness.error_of(name, self._plan.spec, pieces, self._device, self._dtype)
        values = {"error": error, "most_error": correctness.MOST_ERROR[self._dtype]}
        return Result(KERNEL, case, name, values=values)

    def _tokens(self, name: str, contender: Contender) -> Result:
        """Greedy tokens of a few prompts: cold, and from the cache where there is one. `generate`, which the
        others are held to, also tells what it nearly said."""
        prompts = self._prompts("tokens", 4, min(200, self._plan.first_token // 2))
        job, case = Job(prompts, self._plan.correct_tokens), f"{self._plan.correct_tokens}"
        if isinstance(contender, Generate):
            said = contender.considered(job, correctness.NUM_NEAREST)
            values = {"most_gap": correctness.MOST_GAP[self._dtype]}
            return Result(TOKENS, case, name, values=values, outputs=said.outputs, nearest=said.nearest)
        cold = contender.run(job)
        if name not in BACKENDS:
            return Result(TOKENS, case, name, outputs=cold.outputs)
        warm = contender.run(replace(job, is_cold=False))
        assert warm.cached_tokens > 0, "nothing was cached"
        return Result(TOKENS, case, name, outputs=cold.outputs, warm_outputs=warm.outputs)

    def _prefill(self, name: str, case: Prefill, contender: Contender) -> Result:
        runs = self._runs(contender, f"prefill {case.prompt_tokens}", 1, case.prompt_tokens, 1)
        taken_s = median(run.whole.wall_s for run in runs)
        operations = work.prefill_operations(self._plan.spec, case.prompt_tokens)
        values = {"tokens_per_s": case.prompt_tokens / taken_s, "operations_per_s": operations / taken_s}
        return Result(PREFILL, label(case), name, taken_s, values)

    def _decode(self, name: str, case: Decode, contender: Contender) -> Result:
        runs = self._runs(contender, label(case), case.batch, case.prompt_tokens, case.output_tokens)
        steps = [step.wall_s for run in runs for step in run.steps]
        assert steps, "there was no step in which everybody decoded"
        taken_s = median(steps)
        context = case.prompt_tokens + case.output_tokens / 2
        needed = work.decode_bytes(self._plan.spec, case.batch, context, self._itemsize)
        values = {"tokens_per_s": case.batch / taken_s, "bytes_per_s": needed / taken_s}
        return Result(DECODE, label(case), name, taken_s, values)

    def _first_token(self, name: str, ratio: float, contender: Contender) -> Result:
        plan, taken, cached = self._plan, [], 0
        for turn in range(1 + plan.repeats):
            [prompt] = self._prompts(f"first {turn}", 1, plan.first_token)
            if ratio:
                contender.run(Job((prompt,), 1))
                rng = random.Random(f"tail {turn} {ratio}")
                prompt = with_shared_prefix(rng, prompt, ratio, plan.spec.vocabulary)
            run = contender.run(Job((prompt,), 1, is_cold=not ratio))
            cached = run.cached_tokens
            if turn:
                taken.append(run.whole.wall_s)
        if ratio:
            assert cached > 0, "nothing was cached"
        return Result(FIRST, hit_label(ratio), name, median(taken), {"cached_tokens": cached})

    def _runs(self, contender: Contender, what: str, batch: int, length: int, outputs: int) -> list[Run]:
        """Runs of fresh prompts; one more comes first, for whatever is only done once."""
        runs = [
            contender.run(Job(self._prompts(f"{what} {turn}", batch, length), outputs))
            for turn in range(1 + self._plan.repeats)
        ]
        return runs[1:]

    def _prompts(self, what: str, batch: int, length: int) -> tuple[array[int], ...]:
        return random_prompts(random.Random(what), batch, length, self._plan.spec.vocabulary)


def label(case: Prefill | Decode) -> str:
    if isinstance(case, Prefill):
        return f"{case.prompt_tokens:,} tokens"
    return f"{case.batch} x {case.prompt_tokens:,}"


def hit_label(ratio: float) -> str:
    return f"{ratio:.0%} cached"


def agreement(some: tuple[tuple[int, ...], ...], others: tuple[tuple[int, ...], ...]) -> float:
    """Part of the tokens before the first that differs, over all prompts."""
    same = sum(parting(one, other) for one, other in zip(some, others, strict=True))
    return same / sum(map(len, some))


def parting(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The place of the first token that differs; their length if none does."""
    differing = (place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
    return next(differing, len(one))


def _given(contender: Contender | None) -> Contender:
    assert contender is not None
    return contender


def _missing(task: Task, note: str) -> Result:
    return Result(task.section, task.case, task.contender, note=note)


def _told(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
