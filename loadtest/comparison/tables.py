"""A comparison as tables of text: the same on the terminal, in Markdown and in the page."""

from __future__ import annotations

from collections.abc import Callable

from loadtest.comparison.estimates import MEASURES, Measure, estimate, found_rate, found_ratio, ratio
from loadtest.comparison.results import Results, Run, merged
from loadtest.placement.intervals import Interval
from loadtest.text_table import TextTable


def tables(results: Results) -> list[TextTable]:
    """For each workload: a line per contender and rate, the first contender beside the others, searches."""
    found: list[TextTable] = []
    for workload in results.workloads:
        for rate in results.rates(workload):
            found.append(_at_rate(results, workload, rate))
            found += _beside(results, workload, rate)
        found += _searched(results, workload)
    return found


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
                _cell(estimate(runs, MEASURES["hit_ratio"]), percent),
                *(_cell(estimate(runs, MEASURES[name]), ms) for name in names),
                _cell(estimate(runs, MEASURES["goodput"]), _plain),
                _cell(estimate(runs, MEASURES["imbalance"]), _plain),
                ms(total.late.quantile_s(0.99)),
            )
        )
    note = "Geometric means over repeats [95 % interval]. TTFT counts from when a request was due."
    if ceilings:
        note += f" An infinite cache would hit {percent(sum(ceilings) / len(ceilings))}."
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
    parts = [] if targets.ttft_s is None else [f"TTFT ≤ {ms(targets.ttft_s)}"]
    parts += [] if targets.gap_s is None else [f"every gap ≤ {ms(targets.gap_s)}"]
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


def ms(seconds: float) -> str:
    """Three digits, in seconds from one on; "" of what is not known (NaN)."""
    return "" if seconds != seconds else f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def percent(share: float) -> str:
    """share: 0 to 1."""
    return f"{100 * share:.1f} %"


def _plain(value: float) -> str:
    return f"{value:.3g}"
