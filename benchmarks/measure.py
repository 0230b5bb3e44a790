"""Runs a plan's cells over the contenders, side by side, and turns the runs into table rows.

Ours and `generate` run in pairs, one right after the other and each first in turn, so that what slows the
machine down for a while slows both; continuous batching beside the first of them. Knows jobs and rows; knows
neither processes nor terminals.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Protocol, TypeVar

from benchmarks import cases, targets
from benchmarks.cases import (
    Cell,
    FirstToken,
    ModelSpec,
    Overhead,
    Plan,
    Throughput,
    Whole,
    random_prompts,
    with_shared_prefix,
)
from benchmarks.contender import CONTINUOUS, GENERATE, NAMES, OURS, Job, Run
from benchmarks.pairs import ratio
from benchmarks.rows import Row
from benchmarks.spans import Span, median_span, rate

T = TypeVar("T")
Advance = Callable[[str, float], None]
"""Told before each job: what it is, and after it: the work it was, in parameter-tokens."""


class Runs(Protocol):
    """Something that runs a job under one contender: a worker process, or a test's fake."""

    def run(self, job: Job) -> Run: ...


class Bench:
    """One model's measurements, a cell at a time."""

    def __init__(self, spec: ModelSpec, plan: Plan, contenders: Mapping[str, Runs], advance: Advance) -> None:
        self._spec, self._plan = spec, plan
        self._contenders = contenders
        self._advance = advance

    def rows(self, cell: Cell) -> list[Row]:
        """Measure one of the plan's cells."""
        match cell:
            case Throughput():
                return list(self._throughput(cell))
            case FirstToken():
                return list(self._first_token(cell))
            case Whole():
                return list(self._whole(cell))
            case Overhead():
                return list(self._overhead(cell))

    # -- prefill, decode, memory --------------------------------------------------------------------

    def _throughput(self, case: Throughput) -> Iterator[Row]:
        section = f"tokens/s and memory, {case.prompt_tokens:,}-token prompts"
        label = f"batch {case.batch}"
        prefills = self._side_by_side(case.prefill, f"{label}, prefill")
        decodes = self._side_by_side(case, label)

        prompt_tokens = case.batch * case.prompt_tokens
        spans = {name: [run.whole for run in runs] for name, runs in prefills.items()}
        rates = {name: rate(prompt_tokens, median_span(spans[name])) for name in spans}
        yield self._compared(section, f"{label}: prefill", rates, spans, prefills)

        if case.batch > 1:
            beside = median_span([run.first_tokens for run in decodes[OURS]])
            times = beside.cpu_s / median_span(spans[OURS]).cpu_s
            yield Row(
                self._spec.name,
                section,
                f"{label}: prefill, decodes beside",
                {OURS: rate(prompt_tokens, beside)},
                note=f"{times:.2f}x as long",
            )

        steps = {name: [median_span(run.steps) for run in runs] for name, runs in decodes.items()}
        rates = {name: rate(case.batch, median_span(steps[name])) for name in steps}
        row = self._compared(section, f"{label}: steady decode", rates, steps, decodes)
        yield row.judged(*targets.steady_decode(self._spec.name, case.batch, row.ratios))

        peaks = {name: _peak_mib([*prefills[name], *decodes[name]]) for name in NAMES}
        yield Row(self._spec.name, section, f"{label}: peak MiB", amounts=peaks)

    def _side_by_side(self, case: Throughput | Whole, what: str) -> dict[str, list[Run]]:
        """Pairs over the same fresh prompts; continuous batching after the first of them."""
        runs: dict[str, list[Run]] = {name: [] for name in NAMES}
        num_references = self._plan.num_references(self._spec, case)
        for pair in range(self._plan.num_pairs(self._spec, case)):
            rng = self._rng(what, pair)
            prompts = random_prompts(rng, case.batch, case.prompt_tokens, self._spec.vocabulary)
            names = in_turn((OURS, GENERATE), pair) + [CONTINUOUS] * (pair < num_references)
            for name in names:
                runs[name].append(self._run(name, what, Job(prompts, case.output_tokens)))
        return runs

    # -- time to first token ------------------------------------------------------------------------

    def _first_token(self, case: FirstToken) -> Iterator[Row]:
        section, what = "time to first token, ms", f"first token, {case.prompt_tokens:,}"
        misses: dict[str, list[Run]] = {OURS: [], GENERATE: []}
        hits: dict[float, list[Run]] = {part: [] for part in case.hit_ratios}
        for repeat in range(self._plan.num_pairs(self._spec, case)):
            rng = self._rng(what, repeat)
            (prompt,) = random_prompts(rng, 1, case.prompt_tokens, self._spec.vocabulary)
            for name in in_turn((OURS, GENERATE), repeat):
                misses[name].append(self._run(name, f"{what}, miss", Job((prompt,), 1)))
            for part in case.hit_ratios:
                warm = with_shared_prefix(rng, prompt, part, self._spec.vocabulary)
                job = Job((warm,), 1, is_cold=False)
                hits[part].append(self._run(OURS, f"{what}, {part:.0%} hit", job))
        spans = {name: [run.first_tokens for run in runs] for name, runs in misses.items()}
        times = {name: median_span(spans[name]).scaled(1000) for name in spans}
        row = self._compared(section, f"{case.prompt_tokens:,}:  0 % hit", times, spans, misses)
        yield row.judged(*targets.miss(self._spec.name, row.ratios))
        for part, runs in hits.items():
            of_hits = [run.first_tokens for run in runs]
            gain = ratio(of_hits, spans[OURS])
            cached = int(median(run.cached_tokens for run in runs))
            row = Row(
                self._spec.name,
                section,
                f"{case.prompt_tokens:,}: {100 * part:2.0f} % hit ({cached:,})",
                {OURS: median_span(of_hits).scaled(1000)},
                note=f"{gain.cpu.estimate:.1f}x a miss",
            )
            yield row.judged(*targets.hit(self._spec.name, case.prompt_tokens, part, gain))

    # -- whole requests -----------------------------------------------------------------------------

    def _whole(self, case: Whole) -> Iterator[Row]:
        what = f"whole, {case.batch} x {case.prompt_tokens:,}/{case.output_tokens}"
        runs = self._side_by_side(case, what)
        spans = {name: [run.whole for run in each] for name, each in runs.items()}
        times = {name: median_span(spans[name]) for name in spans}
        label = f"{case.batch} x {case.prompt_tokens:,} in, {case.output_tokens} out"
        yield self._compared("whole requests, s", label, times, spans, runs)

    # -- what caching costs -------------------------------------------------------------------------

    def _overhead(self, case: Overhead) -> Iterator[Row]:
        what = f"nothing shared, {case.batch} x {case.prompt_tokens}/{case.output_tokens}"
        runs: dict[bool, list[Run]] = {True: [], False: []}
        for repeat in range(self._plan.num_pairs(self._spec, case)):
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
            ratios={name: ratio(spans[OURS], spans[name]) for name in spans if name != OURS},
            note=_agreement(runs),
        )


def in_turn(items: Sequence[T], repeat: int) -> list[T]:
    """The items, starting with another one in each repeat."""
    first = repeat % len(items)
    return [*items[first:], *items[:first]]


def job_work(spec: ModelSpec, job: Job) -> float:
    """How much computing a job is, for the progress bar."""
    prompt_tokens = sum(len(prompt) for prompt in job.prompts)
    return cases.work(spec, prompt_tokens, len(job.prompts), job.output_tokens)


def cell_work(spec: ModelSpec, plan: Plan, cell: Cell) -> float:
    """The sum of `job_work` over everything that a cell of the plan runs with this model."""
    pairs = plan.num_pairs(spec, cell)
    match cell:
        case FirstToken():
            return pairs * (2 + len(cell.hit_ratios)) * cases.work(spec, cell.prompt_tokens, 1, 1)
        case Overhead():
            return 2 * pairs * _work(spec, cell)
        case Throughput():
            return _beside_work(spec, plan, cell.prefill) + _beside_work(spec, plan, cell)
        case Whole():
            return _beside_work(spec, plan, cell)


def _beside_work(spec: ModelSpec, plan: Plan, case: Throughput | Whole) -> float:
    """Of its pairs, and of continuous batching beside them."""
    return (2 * plan.num_pairs(spec, case) + plan.num_references(spec, case)) * _work(spec, case)


def _work(spec: ModelSpec, case: Throughput | Whole | Overhead) -> float:
    return cases.work(spec, case.batch * case.prompt_tokens, case.batch, case.output_tokens)


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
        for run, wanted in zip(runs, reference, strict=False)  # continuous batching has fewer
        for pair in zip(run.outputs, wanted.outputs, strict=True)
    ]


def _peak_mib(runs: Iterable[Run]) -> float:
    return max(run.peak_bytes for run in runs) / 2**20
