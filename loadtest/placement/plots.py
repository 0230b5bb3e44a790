"""Pictures of a comparison, as PNG files. Knows matplotlib; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl

from cache.counted import counted

mpl.use("Agg")  # files only: no display is asked for

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullFormatter

from loadtest.placement.comparison import Comparison, mean_ttft_s, p99_ttft_s
from loadtest.placement.intervals import Interval
from loadtest.placement.policy_choice import DEFAULT, PolicyChoice
from loadtest.placement.suites import Setting
from loadtest.placement.summary import CellSummary

# Full colours, told apart by eight hues and then by the kind of line. Without red and orange, which are ours.
_COLOURS = (
    "tab:blue",
    "tab:green",
    "tab:purple",
    "tab:brown",
    "tab:pink",
    "tab:gray",
    "tab:olive",
    "tab:cyan",
)
_LINES = ("-", ":", "-.")
_MARKERS = "osv^D<>Pp*hX"
OFF_SCALE = 20.0  # times the ideal: a policy that is further away would flatten all others


def plot_against_load(comparison: Comparison, ideal: PolicyChoice, title: str, path: Path) -> None:
    """Mean and p99 time to first token, hits and imbalance against load, a column per number of replicas.

    comparison: settings of one workload, cache size and number of routers. A band is not drawn: the tables
    have the intervals. Policies too far from the ideal for the scale are named instead.
    """
    far = [policy for policy in comparison.policies if _distance(comparison, policy, ideal) > OFF_SCALE]
    shown = [policy for policy in comparison.policies if policy not in far]
    rows: tuple[tuple[str, Callable[[CellSummary], float], bool], ...] = (
        ("mean TTFT, s", mean_ttft_s, True),
        ("p99 TTFT, s", p99_ttft_s, True),
        ("tokens from the cache, %", lambda summary: 100.0 * summary.hit_ratio, False),
        ("imbalance", lambda summary: summary.imbalance, False),
    )
    replicas = sorted({setting.num_replicas for setting in comparison.settings})
    figure, axes = plt.subplots(
        len(rows),
        len(replicas),
        figsize=(1.5 + 4.2 * len(replicas), 11.5),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for column, num_replicas in enumerate(replicas):
        part = comparison.only(partial(_has_replicas, num_replicas))
        axes[0][column].set_title(counted(num_replicas, "replica"))
        axes[-1][column].set_xlabel("load")
        for row, (label, measure, is_logarithmic) in enumerate(rows):
            axis = axes[row][column]
            _lines(axis, part, shown, measure)
            if is_logarithmic:
                axis.set_yscale("log")
                _label_logarithmic(axis.yaxis)
            if not column:
                axis.set_ylabel(label)
    off = f"\noff the scale: {', '.join(policy.label for policy in far)}" if far else ""
    figure.suptitle(title + off)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="small")
    _save(figure_to=path)


def plot_beside_ideal(comparison: Comparison, ideal: PolicyChoice, title: str, path: Path) -> None:
    """How far each policy's mean and p99 time to first token are from the ideal's, with 95 % intervals."""
    policies = [policy for policy in comparison.policies if policy != ideal]
    policies.sort(key=lambda policy: -_distance(comparison, policy, ideal))
    figure, axes = plt.subplots(
        1, 2, figsize=(11, 1.6 + 0.3 * len(policies)), sharey=True, layout="constrained"
    )
    for axis, label, measure in ((axes[0], "mean", mean_ttft_s), (axes[1], "p99", p99_ttft_s)):
        intervals = [comparison.ratio_over_settings(policy, ideal, measure) for policy in policies]
        estimates = [interval.estimate for interval in intervals]
        finite = [interval.high < float("inf") for interval in intervals]
        errors = [
            [i.estimate - i.low if ok else 0.0 for i, ok in zip(intervals, finite, strict=True)],
            [i.high - i.estimate if ok else 0.0 for i, ok in zip(intervals, finite, strict=True)],
        ]
        for place, policy in enumerate(policies):
            if estimates[place] > OFF_SCALE:
                axis.text(OFF_SCALE, place, f"{estimates[place]:.0f} \u2192", ha="right", va="center")
                continue
            axis.errorbar(
                estimates[place],
                place,
                xerr=[[errors[0][place]], [errors[1][place]]],
                fmt="o",
                capsize=3,
                color=_colour(policy),
            )
            axis.annotate(
                f"{estimates[place]:.2f}",
                (estimates[place] + errors[1][place], place),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize="small",
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
            )
        axis.grid(axis="x", alpha=0.3)
        axis.axvline(1.0, color="black", linewidth=1)
        axis.set_xscale("log")
        axis.set_xlim(_limits(intervals))
        axis.set_xlabel(f"{label} TTFT over the ideal's")
        _label_logarithmic(axis.xaxis, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
    axes[0].set_ylim(-0.7, len(policies) - 0.3)
    axes[0].set_yticks(range(len(policies)), [policy.label for policy in policies], fontsize="small")
    figure.suptitle(title)
    _save(figure_to=path)


def plot_hit_rate(sizes_tokens: Sequence[int], hit_ratios: Sequence[float], title: str, path: Path) -> None:
    """Share of prompt tokens that one least-recently-used cache of each size would hold."""
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    axis.step(sizes_tokens, [100.0 * ratio for ratio in hit_ratios], where="post")
    axis.set_xscale("log")
    axis.set_xlabel("cache size of the whole fleet, tokens")
    axis.set_ylabel("prompt tokens from the cache, %")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    figure.suptitle(title)
    _save(figure_to=path)


def _has_replicas(num_replicas: int, setting: Setting) -> bool:
    return setting.num_replicas == num_replicas


def _distance(comparison: Comparison, policy: PolicyChoice, ideal: PolicyChoice) -> float:
    return comparison.ratio_over_settings(policy, ideal, mean_ttft_s).estimate


def _limits(intervals: Sequence[Interval]) -> tuple[float, float]:
    """Of a logarithmic axis: the ideal, every interval and every estimate that is not off the scale."""
    shown = [interval for interval in intervals if interval.estimate <= OFF_SCALE]
    ends = [end for i in shown for end in (i.low, i.high, i.estimate) if 0.0 < end < 2 * OFF_SCALE]
    is_cut = len(shown) < len(intervals)
    return min([1.0, *ends]) / 1.1, OFF_SCALE * 1.1 if is_cut else max(
        [2.0, *ends]
    ) * 1.2  # room for the last figure


def _label_logarithmic(axis: Axis, leading: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    """These and their multiples by powers of ten, as plain numbers."""
    axis.set_major_locator(LogLocator(subs=leading))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _lines(
    axis: Axes, part: Comparison, policies: Sequence[PolicyChoice], measure: Callable[[CellSummary], float]
) -> None:
    loads = [setting.load for setting in part.settings]
    for number, policy in enumerate(policies):
        values = [part.mean(setting, policy, measure) for setting in part.settings]
        style: dict[str, Any] = {
            "color": _COLOURS[number % len(_COLOURS)],
            "linestyle": _LINES[number // len(_COLOURS) % len(_LINES)],
            "linewidth": 1.2,
        }
        if policy.is_ideal:
            style = {"color": _colour(policy), "linestyle": "--", "linewidth": 1.5}
        elif policy.name == DEFAULT:
            style = {"color": _colour(policy), "linewidth": 2.2, "zorder": 5}
        marker = _MARKERS[number % len(_MARKERS)]
        axis.plot(loads, values, marker=marker, markersize=4, label=policy.label, **style)
    axis.set_xticks(sorted(set(loads)))
    axis.grid(alpha=0.3)


def _colour(policy: PolicyChoice) -> str:
    if policy.is_ideal:
        return "black"
    if policy.name != DEFAULT:
        return "tab:blue"
    if policy.is_late:
        return "tab:brown" if policy.is_shortest_first else "tab:orange"
    return "tab:pink" if policy.is_shortest_first else "tab:red"


def _save(*, figure_to: Path) -> None:
    figure_to.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(figure_to, dpi=110)
    plt.close()
