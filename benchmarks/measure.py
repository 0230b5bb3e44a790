"""Runs a plan's cases over the contenders, side by side, and turns the runs into table rows.

Contenders take turns within each repeat, in another order each time, so that what slows the machine
down for a while slows all of them. Knows jobs and rows; knows neither processes nor terminals.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Protocol, TypeVar

from benchmarks import targets
from benchmarks.cases import (
    FirstToken,
    ModelSpec,
    Overhead,
    Plan,
    Throughput,
    Whole,
    random_prompts,
    with_shared_prefix,
)
from benchmarks.contenders import GENERATE, NAMES, OURS, Job, Run
from benchmarks.rows import Row
from benchmarks.spans import Span, median_span, rate, speedup

T = TypeVar("T")
Advance = Callable[[str, float], None]
"""Told before each job: what it is, and after it: the work it was, in parameter-tokens."""


class Runs(Protocol):
    """Something that runs a job under one contender: a worker process, or a test's fake."""

    def run(self, job: Job) -> Run: ...


class Bench:
    """One model's measurements. `rows` is a generator: a section's rows come as they are measured."""

    def __init__(self, spec: ModelSpec, plan: Plan, contenders: Mapping[str, Runs], advance: Advance) -> None:
        self._spec, self._plan = spec, plan
        self._contenders = contenders
        self._advance = advance

    def rows(self) -> Iterator[Row]:
        plan = self._plan
        for throughput in plan.throughput:
            yield from self._throughput(throughput)
        for first_token in plan.first_token:
            yield from self._first_token(first_token)
        for whole in plan.whole:
            yield from self._whole(whole)
        for overhead in plan.overhead:
            yield from self._overhead(overhead)

    # -- prefill, decode, memory --------------------------------------------------------------------

    def _throughput(self, case: Throughput) -> Iterator[Row]:
        section = f"tokens/s and memory, {case.prompt_tokens:,}-token prompts"
        label = f"batch {case.batch}"
        prefills = self._side_by_side(case, case.repeats, f"{label}, prefill", 1)
        decodes = self._side_by_side(case, case.decode_repeats, f"{label}, decode", case.output_tokens)

        spans = {name: [run.whole for run in runs] for name, runs in prefills.items()}
        prompt_tokens = case.batch * case.prompt_tokens
        rates = {name: rate(prompt_tokens, median_span(spans[name])) for name in spans}
        yield self._compared(section, f"{label}: prefill", rates, spans, prefills)

        steps = {name: [median_span(run.steps) for run in runs] for name, runs in decodes.items()}
        rates = {name: rate(case.batch, median_span(steps[name])) for name in steps}
        row = self._compared(section, f"{label}: steady decode", rates, steps, decodes)
        yield row.judged(*targets.steady_decode(self._spec.name, case.batch, row.ratios))

        peaks = {name: _peak_mib([*prefills[name], *decodes[name]]) for name in NAMES}
        yield Row(self._spec.name, section, f"{label}: peak MiB", amounts=peaks)

    def _side_by_side(
        self, case: Throughput | Whole, repeats: int, what: str, output_tokens: int
    ) -> dict[str, list[Run]]:
        """Every contender over the same fresh prompts, once per repeat."""
        runs: dict[str, list[Run]] = {name: [] for name in NAMES}
        for repeat in range(self._plan.repeats(self._spec, repeats)):
            rng = self._rng(what, repeat)
            prompts = random_prompts(rng, case.batch, case.prompt_tokens, self._spec.vocabulary)
            for name in in_turn(NAMES, repeat):
                runs[name].append(self._run(name, what, Job(prompts, output_tokens)))
        return runs

    # -- time to first token ------------------------------------------------------------------------

    def _first_token(self, case: FirstToken) -> Iterator[Row]:
        section, what = "time to first token, ms", f"first token, {case.prompt_tokens:,}"
        misses: dict[str, list[Run]] = {OURS: [], GENERATE: []}
        hits: dict[float, list[Run]] = {ratio: [] for ratio in case.hit_ratios}
        for repeat in range(self._plan.repeats(self._spec, case.repeats)):
            rng = self._rng(what, repeat)
            (prompt,) = random_prompts(rng, 1, case.prompt_tokens, self._spec.vocabulary)
            for name in in_turn((OURS, GENERATE), repeat):
                misses[name].append(self._run(name, f"{what}, miss", Job((prompt,), 1)))
                if name != OURS:
                    continue
                for ratio in case.hit_ratios:
                    warm = with_shared_prefix(rng, prompt, ratio, self._spec.vocabulary)
                    job = Job((warm,), 1, is_cold=False)
                    hits[ratio].append(self._run(OURS, f"{what}, {ratio:.0%} hit", job))
        spans = {name: [run.first_tokens for run in runs] for name, runs in misses.items()}
        times = {name: median_span(spans[name]).scaled(1000) for name in spans}
        row = self._compared(section, f"{case.prompt_tokens:,}:  0 % hit", times, spans, misses)
        yield row.judged(*targets.miss(self._spec.name, row.ratios))
        for ratio, runs in hits.items():
            of_hits = [run.first_tokens for run in runs]
            gain = speedup(of_hits, spans[OURS])
            cached = int(median(run.cached_tokens for run in runs))
            row = Row(
                self._spec.name,
                section,
                f"{case.prompt_tokens:,}: {100 * ratio:2.0f} % hit ({cached:,})",
                {OURS: median_span(of_hits).scaled(1000)},
                note=f"{gain.cpu_s:.1f}x a miss",
            )
            yield row.judged(*targets.hit(self._spec.name, case.prompt_tokens, ratio, gain))

    # -- whole requests -----------------------------------------------------------------------------

    def _whole(self, case: Whole) -> Iterator[Row]:
        what = f"whole, {case.batch} x {case.prompt_tokens:,}/{case.output_tokens}"
        runs = self._side_by_side(case, case.repeats, what, case.output_tokens)
        spans = {name: [run.whole for run in each] for name, each in runs.items()}
        times = {name: median_span(spans[name]) for name in spans}
        label = f"{case.batch} x {case.prompt_tokens:,} in, {case.output_tokens} out"
        yield self._compared("whole requests, s", label, times, spans, runs)

    # -- what caching costs -------------------------------------------------------------------------

    def _overhead(self, case: Overhead) -> Iterator[Row]:
        what = f"nothing shared, {case.batch} x {case.prompt_tokens}/{case.output_tokens}"
        runs: dict[bool, list[Run]] = {True: [], False: []}
        for repeat in range(self._plan.repeats(self._spec, case.repeats)):
            rng = self._rng(what, repeat)
            prompts = random_prompts(rng, case.batch, case.prompt_tokens, self._spec.vocabulary)
            for caching in in_turn((True, False), repeat):
                job = Job(prompts, case.output_tokens, prefix_caching=caching)
                runs[caching].append(self._run(OURS, f"{what}, caching {'on' if caching else 'off'}", job))
        tokens = case.batch * (case.prompt_tokens + case.output_tokens)
        usual = {caching: usual_total([run.every_step for run in each]) for caching, each in runs.items()}
        cost = usual[True].cpu_s / usual[False].cpu_s - 1
        for caching in (True, False):
            host_s = median(run.host.cpu_s for run in runs[caching])
            row = Row(
                self._spec.name,
                f"prefix caching, nothing shared, tokens/s of {case.batch} x {case.prompt_tokens} in, "
                f"{case.output_tokens} out",
                "on" if caching else "off",
                {OURS: rate(tokens, usual[caching])},
                note=f"host {1000 * host_s:.1f} ms",
            )
            yield row.judged(*targets.caching_cost(self._spec.name, cost)) if caching else row

    # -- parts --------------------------------------------------------------------------------------

    def _run(self, name: str, what: str, job: Job) -> Run:
        self._advance(f"{self._spec.name}: {what} ({name})", 0.0)
        run = self._contenders[name].run(job)
        self._advance("", job_work(self._spec, job))
        return run

    def _rng(self, what: str, repeat: int) -> random.Random:
        return random.Random(f"{self._spec.name} {what} {repeat}")

    def _compared(
        self,
        section: str,
        label: str,
        values: Mapping[str, Span],
        spans: Mapping[str, Sequence[Span]],
        runs: Mapping[str, Sequence[Run]],
    ) -> Row:
        return Row(
            self._spec.name,
            section,
            label,
            dict(values),
            ratios={name: speedup(spans[OURS], spans[name]) for name in spans if name != OURS},
            note=_agreement(runs),
        )


def in_turn(items: Sequence[T], repeat: int) -> list[T]:
    """The items, starting with another one in each repeat."""
    first = repeat % len(items)
    return [*items[first:], *items[:first]]


def job_work(spec: ModelSpec, job: Job) -> float:
    """How much computing a job is, for the progress bar: parameters times tokens, decoded ones weigh more."""
    prompt_tokens = sum(len(prompt) for prompt in job.prompts)
    return spec.num_parameters * (prompt_tokens + 4.0 * len(job.prompts) * job.output_tokens)


def plan_work(spec: ModelSpec, plan: Plan) -> float:
    """The sum of `job_work` over everything a plan runs with this model, roughly."""
    return spec.num_parameters * sum(
        tokens * plan.repeats(spec, repeats) for tokens, repeats in _weighed_tokens(plan)
    )


def _weighed_tokens(plan: Plan) -> Iterator[tuple[float, int]]:
    """Per case: tokens of one repeat as `job_work` weighs them, and repeats."""
    everyone = len(NAMES)
    for case in plan.throughput:
        prompts = case.batch * case.prompt_tokens
        yield everyone * (prompts + 4.0 * case.batch), case.repeats
        yield everyone * (prompts + 4.0 * case.batch * case.output_tokens), case.decode_repeats
    for first in plan.first_token:
        yield (2 + len(first.hit_ratios)) * (first.prompt_tokens + 4.0), first.repeats
    for whole in plan.whole:
        yield everyone * whole.batch * (whole.prompt_tokens + 4.0 * whole.output_tokens), whole.repeats
    for pair in plan.overhead:
        yield 2 * pair.batch * (pair.prompt_tokens + 4.0 * pair.output_tokens), pair.repeats


def usual_total(runs: Sequence[Sequence[Span]]) -> Span:
    """What a run usually takes: the sum over its steps of the median over runs, step by step.

    Runs of the same shape take the same steps, so a disturbed step is outvoted by its peers in other
    runs; the median of whole runs would need far more of them to see one percent.
    """
    lengths = {len(run) for run in runs}
    if len(lengths) != 1:
        raise ValueError(f"runs of one shape take one number of steps, not {sorted(lengths)}")
    usual = [median_span(step) for step in zip(*runs, strict=True)]
    return Span(sum(span.wall_s for span in usual), sum(span.cpu_s for span in usual))


def _agreement(runs: Mapping[str, Sequence[Run]]) -> str:
    """Empty when everybody gave `generate`'s tokens; else who did not, and how often."""
    reference = runs[GENERATE]
    differing = []
    for name, theirs in runs.items():
        pairs = _paired_outputs(theirs, reference)
        count = sum(mine != wanted for mine, wanted in pairs)
        if count:
            differing.append(f"{name} differs in {count}/{len(pairs)}")
    return ", ".join(differing)


def _paired_outputs(
    runs: Sequence[Run], reference: Sequence[Run]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [
        pair
        for run, wanted in zip(runs, reference, strict=True)
        for pair in zip(run.outputs, wanted.outputs, strict=True)
    ]


def _peak_mib(runs: Iterable[Run]) -> float:
    return max(run.peak_bytes for run in runs) / 2**20
