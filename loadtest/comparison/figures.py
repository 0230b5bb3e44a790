"""Plots of a comparison as SVG that takes its colours from the page around it. Knows matplotlib.

Figures are drawn in marker colours, which become CSS variables: one drawing for light and for dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # files only: no display is asked for

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.comparison.estimates import MEASURES, estimate
from loadtest.comparison.page import Picture
from loadtest.comparison.results import Results, Run
from loadtest.open_loop.histogram import Histogram
from loadtest.open_loop.tally import UNKNOWN
from loadtest.placement.intervals import Interval

NUM_COLOURS = 8
_INK = "#010203"
_SERIES = tuple(f"#0{index}a0b0" for index in range(1, NUM_COLOURS + 1))
_SMOOTH_S = 5  # seconds of a moving sum: bins of one second hold a handful of requests
_LINES = ("-", "--", ":", "-.")

_STYLE: Any = {  # matplotlib's own type for it lists four hundred names
    "svg.fonttype": "none",  # text stays text: searchable, and in the page's font
    "svg.hashsalt": "warmpath",  # equal results give an equal page
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _INK,
    "grid.alpha": 0.15,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def pictures(results: Results) -> Iterator[Picture]:
    """Per workload and rate: distributions, over time, per replica; per workload: goodput against rate."""
    with mpl.rc_context(_STYLE):
        for workload in results.workloads:
            for rate in results.rates(workload):
                where = f"{workload} at {rate:g} requests/s"
                yield _picture(f"{where}: how long it takes", _distributions(results, workload, rate))
                yield _picture(f"{where}: over time", _over_time(results, workload, rate))
                yield _picture(f"{where}: load per replica", _per_replica(results, workload, rate))
            if len({run.rate_per_s for run in results.runs if run.workload == workload}) > 1:
                yield _picture(f"{workload}: goodput against load", _goodput(results, workload))


def _distributions(results: Results, workload: str, rate: float) -> Figure:
    """How many requests take longer than this: the tail is where policies differ."""
    figure = Figure(figsize=(9, 3.2))
    kinds: tuple[tuple[str, Callable[[Run], Histogram]], ...] = (
        ("time to first token, s", lambda run: run.tally.ttft),
        ("gap between two pieces of text, s", lambda run: run.tally.gaps),
    )
    for axes, (title, of) in zip(figure.subplots(1, 2), kinds, strict=True):
        for number, contender in enumerate(results.contenders):
            total = Histogram()
            for run in results.shown(contender, workload, rate):
                total.merge(of(run))
            curve = total.curve()
            if curve:
                longer = [max(1 - share, 0.5 / total.count) for _, share in curve]
                axes.step([seconds for seconds, _ in curve], longer, where="post", **_line(number, contender))
        axes.set(xscale="log", yscale="log", xlabel=title, ylabel="share that takes longer")
        axes.axhline(0.01, color=_INK, linewidth=0.6, alpha=0.5)
    _legend(figure)
    return figure


def _over_time(results: Results, workload: str, rate: float) -> Figure:
    """Of each contender's first repeat: hit rate, and requests on their way."""
    figure = Figure(figsize=(9, 3.2))
    hits, queue = figure.subplots(1, 2)
    for number, contender in enumerate(results.contenders):
        for run in results.shown(contender, workload, rate)[:1]:
            bins = run.tally.bins
            spans = [bins[max(0, at - _SMOOTH_S + 1) : at + 1] for at in range(len(bins))]
            sums = [
                (sum(b.cached_tokens for b in span), sum(b.prompt_tokens for b in span)) for span in spans
            ]
            known = [(at, 100 * cached / prompt) for at, (cached, prompt) in enumerate(sums) if prompt]
            hits.plot([at for at, _ in known], [share for _, share in known], **_line(number, contender))
            queue.plot(range(len(bins)), [each.in_flight for each in bins], **_line(number, contender))
    hits.set(xlabel="s", ylabel=f"hit rate of {_SMOOTH_S} s, %", ylim=(0, 100))
    queue.set(xlabel="s", ylabel="requests on their way")
    queue.set_ylim(bottom=0)
    _legend(figure)
    return figure


def _per_replica(results: Results, workload: str, rate: float) -> Figure:
    """Prompt tokens that each replica computed, the busiest first; replicas differ from repeat to repeat."""
    figure = Figure(figsize=(9, 3.0))
    axes = figure.subplots()
    width = 0.8 / len(results.contenders)
    for number, contender in enumerate(results.contenders):
        runs = results.shown(contender, workload, rate)
        ranked = [
            sorted((s.computed_tokens for n, s in run.tally.replicas.items() if n != UNKNOWN), reverse=True)
            for run in runs
        ]
        places = max(map(len, ranked), default=0)
        means = [
            sum(of_run[place] if place < len(of_run) else 0 for of_run in ranked) / len(ranked)
            for place in range(places)
        ]
        at = [place + number * width for place in range(places)]
        axes.bar(at, means, width, color=_SERIES[number % NUM_COLOURS], label=contender)
    axes.set(xlabel="replica, the busiest first", ylabel="prompt tokens computed", xticks=[])
    _legend(figure)
    return figure


def _goodput(results: Results, workload: str) -> Figure:
    """Good answers per second against requests per second, tries of searches included."""
    figure = Figure(figsize=(9, 3.2))
    axes = figure.subplots()
    highest = 0.0
    for number, contender in enumerate(results.contenders):
        known = _goodput_by_rate(results, contender, workload)
        highest = max([highest, *(rate for rate, _ in known)])
        line = _line(number, contender)
        axes.plot([rate for rate, _ in known], [found.estimate for _, found in known], marker="o", **line)
        sure = [(rate, found) for rate, found in known if found.high != float("inf")]
        axes.vlines(
            [rate for rate, _ in sure],
            [found.low for _, found in sure],
            [found.high for _, found in sure],
            color=_SERIES[number % NUM_COLOURS],
        )
    axes.plot([0, highest], [0, highest], color=_INK, linewidth=0.6, alpha=0.5)
    axes.set(xlabel="requests/s", ylabel="good answers/s")
    _legend(figure)
    return figure


def _goodput_by_rate(results: Results, contender: str, workload: str) -> list[tuple[float, Interval]]:
    """Of one contender's whole runs, ascending; without rates at which nothing is known."""
    runs: dict[float, list[Run]] = {}
    for run in results.runs:
        if (run.contender, run.workload) == (contender, workload) and run.is_whole:
            runs.setdefault(run.rate_per_s, []).append(run)
    estimates = [(rate, estimate(at_rate, MEASURES["goodput"])) for rate, at_rate in sorted(runs.items())]
    return [(rate, found) for rate, found in estimates if found is not None]


def _line(number: int, contender: str) -> dict[str, Any]:
    line = _LINES[number // NUM_COLOURS % len(_LINES)]
    return {"color": _SERIES[number % NUM_COLOURS], "linestyle": line, "label": contender}


def _legend(figure: Figure) -> None:
    axes: Sequence[Axes] = figure.axes
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(handles)))


def _picture(title: str, figure: Figure) -> Picture:
    figure.patch.set_alpha(0.0)
    for axes in figure.axes:
        axes.patch.set_alpha(0.0)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()[out.getvalue().index("<svg") :]
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)  # as wide as the page lets it
    svg = svg.replace(_INK, "var(--ink)")
    for number, colour in enumerate(_SERIES, start=1):
        svg = svg.replace(colour, f"var(--c{number})")
    return Picture(title, svg)
