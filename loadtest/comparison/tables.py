"""A comparison as tables of text: the same on the terminal, in Markdown and in the page."""

from __future__ import annotations

from collections.abc import Callable

from cache.counted import counted
from loadtest.client.answer import Failure
from loadtest.comparison.estimates import MEASURES, Measure, estimate, found_rate, found_ratio, ratio
from loadtest.comparison.results import Results, Run, merged
from loadtest.placement.intervals import Interval
from loadtest.text_table import TextTable

LATE_S = 0.05  # beyond it the client itself is part of what was measured
FAILED_SHARE = 0.01  # of requests without an answer: from there on a p99 of the others says little
KNOWN_SHARE = (
    0.2  # of prompt tokens, more than a cache that begins empty could hit: finer blocks hit a few more
)


def tables(results: Results) -> list[TextTable]:
    """For each workload: a line per contender and rate, the first contender beside the others, searches."""
    found: list[TextTable] = []
    for workload in results.workloads:
        for rate in results.rates(workload):
            found.append(_at_rate(results, workload, rate))
            found += _beside(results, workload, rate)
        found += _searched(results, workload)
    return found


def warnings(results: Results) -> list[str]:
    """What makes the numbers less than they seem."""
    told = []
    if results.was_stopped:
        told.append(f"Stopped before the end: only what ran is shown. {_cut_short(results)}".rstrip())
    late = [
        run
        for run in results.runs
        if (run.is_whole or run.kind == "fixed") and run.tally.late.quantile_s(0.99) > LATE_S
    ]
    if late:
        worst = max(late, key=lambda run: run.tally.late.quantile_s(0.99))
        told.append(
            f"The client was late: in {len(late)} of {counted(len(results.runs), 'run')} the p99 of lateness "
            f"is above {_ms(LATE_S)}, at worst {_ms(worst.tally.late.quantile_s(0.99))} "
            f"({worst.contender}, {worst.workload} at {worst.rate_per_s:g}/s). "
            "Times count from when a request was due: lateness is in them."
        )
    failed = [run for run in results.runs if run.kind == "fixed" and _failed_share(run) > FAILED_SHARE]
    if failed:
        worst = max(failed, key=_failed_share)
        told.append(
            f"Times are those of answers: in {len(failed)} of {counted(len(results.runs), 'run')} more than "
            f"{_percent(FAILED_SHARE)} of the requests had none, at worst {_percent(_failed_share(worst))} "
            f"({worst.contender}, {worst.workload} at {worst.rate_per_s:g}/s). Who leaves out the latest is "
            "no sooner for that: goodput counts them."
        )
    unsent = sum(run.tally.failures.get(Failure.NO_FILES, 0) for run in results.runs)
    if unsent:
        told.append(
            f"The client ran out of open files: {counted(unsent, 'request')} never went out, which is "
            "no fault of the server. Raise the limit (`ulimit -n`)."
        )
    if any(run.tally.untold for run in results.runs):
        told.append("Some answers did not tell their cached tokens: hit rates leave them out.")
    known = [
        run
        for run in results.runs
        if run.is_whole and (run.tally.hit_ratio or 0.0) > run.ceiling + KNOWN_SHARE
    ]
    if known:
        most = max(known, key=lambda run: (run.tally.hit_ratio or 0.0) - run.ceiling)
        told.append(
            f"Prompts were cached before they were sent: {_percent(most.tally.hit_ratio or 0.0)} of their "
            f"tokens ({most.contender}, {most.workload}), where an infinite cache that begins empty would "
            f"hit {_percent(most.ceiling)}. A server that was sent them before needs another --seed."
        )
    if results.num_repeats == 1:
        told.append("One repeat: there are no intervals, and a difference may be chance.")
    return told


def _cut_short(results: Results) -> str:
    """What became of the run that was on its way."""
    run = results.cut_short
    if run is None:
        return ""
    is_shown = run in results.shown(run.contender, run.workload, run.rate_per_s)
    return (
        f"{run.contender}, {run.workload} at {run.rate_per_s:g}/s was cut short in repeat {run.repeat + 1}: "
        f"{counted(run.tally.due, 'request')} sent, {run.tally.answers} answered, {run.tally.num_failed} "
        f"failed, and {run.tally.unanswered} on their way, which count as neither."
        f"{'' if is_shown else ' No table has it.'}"
    )


def _failed_share(run: Run) -> float:
    """Of the requests that are over."""
    tally = run.tally
    num_over = tally.num_failed + tally.answers
    return tally.num_failed / num_over if num_over else 0.0


def _at_rate(results: Results, workload: str, rate: float) -> TextTable:
    names = ("ttft_mean", "ttft_p50", "ttft_p99", "gap_p50", "gap_p99")
    titles = tuple(MEASURES[name].title for name in names)
    columns = (
        *("contender", "answers", "failed", "hit rate"),
        *titles,
        *("goodput/s", "imbalance", "late p99"),
    )
    rows = []
    ceilings: list[float] = []
    for contender in results.contenders:
        runs = results.shown(contender, workload, rate)
        if not runs:
            continue
        is_whole = runs[0].is_whole
        ceilings += [run.ceiling for run in runs if is_whole]
        total = merged(runs)
        rows.append(
            (
                contender if is_whole else f"{contender}, cut short",
                str(total.answers),
                _failed(runs),
                _cell(estimate(runs, MEASURES["hit_ratio"]), _percent),
                *(_cell(estimate(runs, MEASURES[name]), _ms) for name in names),
                _cell(estimate(runs, MEASURES["goodput"]), _plain),
                _cell(estimate(runs, MEASURES["imbalance"]), _plain),
                _ms(total.late.quantile_s(0.99)),
            )
        )
    note = "Geometric means over repeats [95 % interval]. TTFT counts from when a request was due."
    if ceilings:
        note += f" An infinite cache would hit {_percent(sum(ceilings) / len(ceilings))}."
    return TextTable(f"{workload} at {rate:g} requests/s", columns, tuple(rows), note)


def _beside(results: Results, workload: str, rate: float) -> list[TextTable]:
    """The first contender against each other one; nothing where it is alone."""
    first, *others = results.contenders
    ours = results.fixed(first, workload, rate)
    names = ("ttft_mean", "ttft_p99", "gap_p99", "hit_ratio", "goodput")
    rows = []
    for other in others:
        theirs = results.fixed(other, workload, rate)
        if ours and theirs:
            cells = [(MEASURES[name], ratio(ours, theirs, MEASURES[name])) for name in names]
            rows.append((other, *(_versus(measure, interval) for measure, interval in cells)))
    if not rows:
        return []
    titles = tuple(MEASURES[name].title for name in names)
    note = "Paired by repeat. better, worse: the whole 95 % interval is on that side of 1."
    title = f"{workload} at {rate:g} requests/s: {first} over each rival"
    return [TextTable(title, ("rival", *titles), tuple(rows), note)]


def _searched(results: Results, workload: str) -> list[TextTable]:
    first = results.contenders[0]
    rows = []
    for contender in results.contenders:
        rate = found_rate(results, contender, workload)
        if rate is not None:
            times = found_ratio(results, first, contender, workload) if contender != first else None
            rows.append((contender, _cell(rate, _plain), "" if times is None else str(times)))
    if not rows:
        return []
    title = f"{workload}: highest rate at which {_promise(results)}"
    return [TextTable(title, ("contender", "requests/s", f"{first} over it"), tuple(rows))]


def _promise(results: Results) -> str:
    targets = results.targets
    parts = [] if targets.ttft_s is None else [f"TTFT ≤ {_ms(targets.ttft_s)}"]
    parts += [] if targets.gap_s is None else [f"every gap ≤ {_ms(targets.gap_s)}"]
    return f"99 % of requests keep {' and '.join(parts)}" if parts else "99 % of requests are answered"


def _failed(runs: list[Run]) -> str:
    total = merged(runs)
    kinds = ", ".join(f"{number} {kind}" for kind, number in total.failures.items())
    return kinds or "0"


def _versus(measure: Measure, interval: Interval | None) -> str:
    if interval is None:
        return ""
    is_better = interval.is_above_1 if measure.more_is_better else interval.is_below_1
    is_worse = interval.is_below_1 if measure.more_is_better else interval.is_above_1
    return f"{interval}{' better' if is_better else ' worse' if is_worse else ''}"


def _cell(interval: Interval | None, shown: Callable[[float], str]) -> str:
    if interval is None:
        return ""
    if interval.high == float("inf"):
        return shown(interval.estimate)
    return f"{shown(interval.estimate)} [{shown(interval.low)}, {shown(interval.high)}]"


def _ms(seconds: float) -> str:
    return "" if seconds != seconds else f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _plain(value: float) -> str:
    return f"{value:.3g}"
