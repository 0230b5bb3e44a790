"""Tables of a comparison: on the terminal, in Markdown and as JSON. Knows text; decides nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from loadtest.placement.comparison import Comparison, Measure, Versus, mean_ttft_s, p99_ttft_s
from loadtest.placement.policy_choice import PolicyChoice
from loadtest.placement.suites import Setting
from loadtest.placement.summary import LENGTH_LABELS, CellSummary
from loadtest.report_folder import remove_earlier, write_whole
from loadtest.text_table import TextTable
from loadtest.workloads.request import Workload

MARKDOWN, JSON = "report.md", "results.json"
AGAINST_LOAD, BESIDE_IDEAL = "-against-load.png", "-beside-ideal.png"  # ends of plots' names


def tables(comparison: Comparison, ideal: PolicyChoice, ours: Sequence[PolicyChoice]) -> list[TextTable]:
    """For each workload, cache size and number of routers: beside the ideal, hits and imbalance, by prompt
    length; and for all settings together, each of `ours` beside each rival."""
    found: list[TextTable] = []
    for group, part in groups(comparison):
        found += [
            _beside_ideal(f"{group}: mean time to first token, over the ideal's", part, ideal, mean_ttft_s),
            _beside_ideal(f"{group}: p99 time to first token, over the ideal's", part, ideal, p99_ttft_s),
            _plain(f"{group}: mean time to first token, s", part, mean_ttft_s, "{:.3f}"),
            _plain(f"{group}: prompt tokens from the cache, %", part, _hit_percent, "{:.1f}"),
            _plain(f"{group}: imbalance (busiest replica over the mean)", part, _imbalance, "{:.2f}"),
            _by_length(f"{group}: mean time to first token by prompt length, over the ideal's", part, ideal),
        ]
    found += _routers(comparison)
    for one in ours:
        rivals = [policy for policy in comparison.policies if policy != one and not policy.is_ideal]
        if rivals:
            found.append(_versus(one, comparison.versus(one, rivals, mean_ttft_s), "mean"))
            found.append(_versus(one, comparison.versus(one, rivals, p99_ttft_s), "p99"))
    return found


def of_recording(trace: Workload) -> str:
    """What to know of a recording: who was refused, and keys that hide hits; "" if there is nothing."""
    told = ""
    if trace.num_further_answers:
        told += (
            f"{trace.num_further_answers:,} of {len(trace.requests):,} requests are further answers to a "
            "prompt (`n`), each counted as one. "
        )
    if trace.num_refused:
        told += (
            f"{trace.num_refused:,} of {len(trace.requests):,} were refused when they were recorded; their "
            "answers are taken to be as long as the others' on average. "
        )
    if trace.num_keys > 1:
        told += (
            f"Block ids are of {trace.num_keys} keys: what prompts share across them is not seen, so there "
            "are fewer hits here than there were. Set one `record.key` or `record.key_file` for all Routers. "
        )
    return told


def told_too_late(comparison: Comparison, changes_s: Sequence[float]) -> str:
    """Windows whose requests have all come before the last of these changes of the fleet; "" if none.

    changes_s: when they are asked for, since the start of the simulation.
    """
    latest_s = max(changes_s, default=0.0)
    over = []
    for setting in comparison.settings:
        summaries = [each for policy in comparison.policies for each in comparison.of(setting, policy)]
        last_s = min(summary.last_arrival_s for summary in summaries)
        if last_s < latest_s:
            over.append(f"{setting.workload} {setting.num_replicas}@{setting.load:g} ({last_s:.1f} s)")
    if not over:
        return ""
    return (
        f"The fleet changes until {latest_s:g} s, and the last request of these windows (replicas@load) "
        f"comes before: {', '.join(dict.fromkeys(over))}. Changes after it are not in their figures; "
        "more --requests make windows longer."
    )


def print_tables(found: Sequence[TextTable], console: Console) -> None:
    for table in found:
        table.print_on(console)


def write_report(
    folder: Path, found: Sequence[TextTable], comparison: Comparison, conditions: Mapping[str, Any]
) -> None:
    """report.md and results.json: the same tables, and every cell's summary; in the place of all that an
    earlier report left in the folder. Raises OSError."""
    remove_earlier(folder, MARKDOWN, JSON, f"*{AGAINST_LOAD}", f"*{BESIDE_IDEAL}")
    head = "\n".join(f"- {name}: {value}" for name, value in conditions.items())
    body = "\n\n".join(table.markdown() for table in found)
    write_whole(folder / MARKDOWN, f"# Placement policies\n\n{head}\n\n{body}\n".encode())
    document = {"conditions": dict(conditions), "cells": list(_cells(comparison))}
    write_whole(folder / JSON, f"{json.dumps(document, indent=1)}\n".encode())


def _cells(comparison: Comparison) -> Iterator[dict[str, Any]]:
    for setting in comparison.settings:
        for policy in comparison.policies:
            for seed, summary in comparison.by_seed(setting, policy).items():
                yield {**asdict(setting), "policy": policy.label, "seed": seed, **asdict(summary)}


def groups(comparison: Comparison) -> Iterator[tuple[str, Comparison]]:
    """One part per workload, cache size and number of routers, with what to call it."""
    keys = sorted({(s.workload, s.cache_tokens, s.num_routers) for s in comparison.settings})
    for key in keys:
        workload, cache_tokens, num_routers = key
        label = f"{workload}, {cache_tokens / 1e6:g}M tokens per replica"
        if num_routers > 1:
            label += f", {num_routers} routers"
        yield label, comparison.only(partial(_is_in_group, key))


def _is_in_group(key: tuple[str, int, int], setting: Setting) -> bool:
    return (setting.workload, setting.cache_tokens, setting.num_routers) == key


def _columns(part: Comparison) -> tuple[str, ...]:
    return tuple(f"{s.num_replicas}@{s.load:g}" for s in part.settings)


def _beside_ideal(title: str, part: Comparison, ideal: PolicyChoice, measure: Measure) -> TextTable:
    """Best first."""
    overall = {policy: part.ratio_over_settings(policy, ideal, measure) for policy in part.policies}
    rows = [
        (
            policy.label,
            *(f"{part.ratio(setting, policy, ideal, measure).estimate:.2f}" for setting in part.settings),
            str(overall[policy]),
        )
        for policy in sorted(overall, key=lambda policy: overall[policy].estimate)
    ]
    columns = ("policy", *_columns(part), "geometric mean [95 %]")
    return TextTable(
        title, columns, tuple(rows), "Columns: replicas@load. Geometric means over paired seeds."
    )


def _plain(title: str, part: Comparison, measure: Measure, pattern: str) -> TextTable:
    rows = [
        (policy.label, *(pattern.format(part.mean(setting, policy, measure)) for setting in part.settings))
        for policy in part.policies
    ]
    return TextTable(title, ("policy", *_columns(part)), tuple(rows))


def _by_length(title: str, part: Comparison, ideal: PolicyChoice) -> TextTable:
    rows = [
        (policy.label, *(_length_cell(part, policy, ideal, place) for place in range(len(LENGTH_LABELS))))
        for policy in part.policies
    ]
    note = "Geometric means over all settings and seeds with such prompts."
    return TextTable(title, ("policy", *LENGTH_LABELS), tuple(rows), note)


def _length_cell(part: Comparison, policy: PolicyChoice, ideal: PolicyChoice, place: int) -> str:
    ratio = part.ratio_by_length(policy, ideal, place)
    return "" if ratio is None else f"{ratio:.2f}"


def _routers(comparison: Comparison) -> list[TextTable]:
    """What it costs that routers learn of each other's work late; nothing if there was only one."""
    counts = sorted({setting.num_routers for setting in comparison.settings} - {1})
    rows = []
    for policy in comparison.policies:
        if policy.is_ideal:
            continue
        means = [comparison.beside_one_router(policy, count, mean_ttft_s) for count in counts]
        tails = [comparison.beside_one_router(policy, count, p99_ttft_s) for count in counts]
        rows.append((policy.label, *("" if ratio is None else str(ratio) for ratio in (*means, *tails))))
    if not counts:
        return []
    columns = tuple(f"{what}, {count} routers" for what in ("mean", "p99") for count in counts)
    title = "Several routers beside one: time to first token, geometric mean over settings and seeds [95 %]"
    return [TextTable(title, ("policy", *columns), tuple(rows))]


def _versus(ours: PolicyChoice, found: Sequence[Versus], what: str) -> TextTable:
    """Closest rivals first: those that leave the least to gain."""
    rows = [
        (
            versus.rival.label,
            str(versus.overall),
            f"{versus.num_better}/{len(versus.cells)}",
            f"{versus.num_worse}/{len(versus.cells)}",
            versus.verdict,
        )
        for versus in sorted(found, key=lambda versus: -versus.overall.estimate)
    ]
    return TextTable(
        f"{ours.label} beside each rival: {what} time to first token, ratio (below 1: it is sooner)",
        ("rival", "geometric mean [95 %]", "cells better", "cells worse", "verdict"),
        tuple(rows),
        "Significant: the 95 % interval over paired seeds leaves 1 out.",
    )


def _hit_percent(summary: CellSummary) -> float:
    return 100.0 * summary.hit_ratio


def _imbalance(summary: CellSummary) -> float:
    return summary.imbalance
