"""From cells' figures to verdicts, tables, files and pictures, on figures worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loadtest.placement.comparison import Comparison, Versus, mean_ttft_s
from loadtest.placement.intervals import Interval
from loadtest.placement.policy_choice import PolicyChoice
from loadtest.placement.report import groups, tables, write_report
from loadtest.placement.suites import GridSpec, Setting
from loadtest.placement.summary import summarize
from loadtest.text_table import TextTable
from tests.fakes.placement import BASE_S, WORKLOAD, fake_result, fake_spec

IDEAL, OURS, RIVAL = PolicyChoice("ideal"), PolicyChoice("expected_time"), PolicyChoice("round_robin")


def comparison() -> Comparison:
    made = Comparison()
    for replicas in (4, 16):
        for load in (0.5, 1.0):
            setting = Setting("made", 1_500_000, 1, replicas, load)
            for policy in (IDEAL, OURS, RIVAL):
                for seed in (0, 1, 2):
                    spec = fake_spec(policy.name, seed=seed, replicas=replicas, load=load)
                    made.add(setting, policy, seed, summarize(fake_result(spec), replicas))
    return made


class TestSummary:
    def test_warm_up_does_not_count(self) -> None:
        spec = fake_spec()
        result = fake_result(spec)
        ttft_s = result.ttft_s.copy()
        ttft_s[:2] = 1e6  # an eighth of 16
        assert summarize(replace(result, ttft_s=ttft_s), 4) == summarize(result, 4)

    def test_a_worked_example(self) -> None:
        result = fake_result(fake_spec("ideal", load=0.5))
        inputs = np.array([1000] * 8 + [5000] * 4 + [40_000] * 4)
        found = summarize(replace(result, input_tokens=inputs, cached_tokens=inputs // 4), 4)
        assert found.num_requests == 14
        assert found.realized_load == pytest.approx(0.5)
        assert found.mean_ttft_s == found.p99_ttft_s == 0.5
        assert found.hit_ratio == 0.25
        assert found.mean_tpot_s == pytest.approx(0.1)
        assert found.mean_ttft_by_length_s == (0.5, 0.5, None, 0.5)
        # Requests go to replicas in turns: after warm-up those to 2 and 3 have one of 1,000 tokens more.
        assert found.imbalance == pytest.approx(46_750 / 46_375, rel=0.01)


class TestComparison:
    def test_ratios_are_those_of_the_pairs(self) -> None:
        made = comparison()
        found = made.ratio(made.settings[0], OURS, IDEAL, mean_ttft_s)
        assert (found.estimate, found.low, found.high) == pytest.approx((1.1, 1.1, 1.1))
        overall = made.ratio_over_settings(OURS, RIVAL, mean_ttft_s)
        assert overall.estimate == pytest.approx(BASE_S["expected_time"] / BASE_S["round_robin"])
        assert made.ratio_by_length(RIVAL, IDEAL, 0) == pytest.approx(2.0)
        assert made.ratio_by_length(RIVAL, IDEAL, 3) is None

    def test_verdicts(self) -> None:
        (better,) = comparison().versus(OURS, [RIVAL], mean_ttft_s)
        assert (better.num_better, better.num_worse, better.verdict) == (4, 0, "better")
        (worse,) = comparison().versus(RIVAL, [OURS], mean_ttft_s)
        assert worse.verdict == "worse"

    def test_one_cell_in_ten_may_be_worse_but_not_two(self) -> None:
        good, bad, overall = Interval(0.9, 0.8, 0.95), Interval(1.2, 1.1, 1.3), Interval(0.9, 0.85, 0.95)
        assert Versus(RIVAL, overall, [good] * 9 + [bad]).verdict == "better"
        assert Versus(RIVAL, overall, [good] * 8 + [bad] * 2).verdict.startswith("better, but")
        assert Versus(RIVAL, Interval(0.99, 0.9, 1.1), [good]).verdict == "no significant difference"
        # A single seed has no interval: a quarter of the rival's time is no "difference" either way.
        alone = Interval(0.25, 0.0, math.inf)
        assert Versus(RIVAL, alone, [alone]).verdict == "one seed: cannot tell"

    def test_settings_split_into_groups_of_one_table(self) -> None:
        made = comparison()
        summary = made.of(made.settings[0], OURS)[0]
        made.add(Setting("made", 400_000, 2, 4, 0.5), OURS, 0, summary)
        assert [label for label, _ in groups(made)] == [
            "made, 0.4M tokens per replica, 2 routers",
            "made, 1.5M tokens per replica",
        ]


class TestReport:
    def test_the_tables_say_it(self) -> None:
        found = {table.title.split(": ")[-1]: table for table in tables(comparison(), IDEAL, [OURS])}
        beside = found["mean time to first token, over the ideal's"]
        assert beside.columns[:5] == ("policy", "4@0.5", "4@1", "16@0.5", "16@1")
        assert beside.rows[0][:2] == ("ideal", "1.00")
        assert beside.rows[1] == ("expected_time", *["1.10"] * 4, "1.100 [1.100, 1.100]")
        assert beside.rows[2][1] == "2.00"
        assert found["prompt tokens from the cache, %"].rows[0] == ("ideal", *["50.0"] * 4)
        versus = next(table for table in found.values() if table.title.startswith("expected_time beside"))
        assert versus.rows == (("round_robin", "0.550 [0.550, 0.550]", "4/4", "0/4", "better"),)

    def test_several_routers_stand_beside_one(self) -> None:
        made = Comparison()
        for num_routers, factor in ((1, 1.0), (2, 1.2)):
            for seed in (0, 1):
                result = fake_result(fake_spec(seed=seed))
                slower = replace(result, ttft_s=result.ttft_s * factor)
                setting = Setting("made", 1_500_000, num_routers, 4, 0.5)
                for policy in (IDEAL, OURS):
                    made.add(setting, policy, seed, summarize(slower, 4))
        (found,) = [t for t in tables(made, IDEAL, []) if t.title.startswith("Several routers")]
        assert found.columns == ("policy", "mean, 2 routers", "p99, 2 routers")
        assert found.rows == (("expected_time", *["1.200 [1.200, 1.200]"] * 2),)
        assert not [t for t in tables(comparison(), IDEAL, []) if t.title.startswith("Several routers")]

    def test_markdown_is_a_table(self) -> None:
        text = TextTable("Title", ("a", "b"), (("x", "1"),), "Note.").markdown()
        assert text == "**Title**\n\n| a | b |\n|---|---:|\n| x | 1 |\n\nNote."

    def test_files_hold_every_cell(self, tmp_path: Path) -> None:
        made = comparison()
        write_report(tmp_path / "new", tables(made, IDEAL, [OURS]), made, {"seeds": "0, 1, 2"})
        document = json.loads((tmp_path / "new" / "results.json").read_text())
        assert len(document["cells"]) == 4 * 3 * 3
        assert {cell["policy"] for cell in document["cells"]} == {"ideal", "expected_time", "round_robin"}
        assert "- seeds: 0, 1, 2" in (tmp_path / "new" / "report.md").read_text()

    def test_what_an_earlier_report_left_is_not_beside_a_later_one(self, tmp_path: Path) -> None:
        """Its plots stayed beside tables of other policies where --no-plots was asked for."""
        for name in ("report.md", "made-against-load.png", "made-beside-ideal.png", "mine.png"):
            (tmp_path / name).write_text("of yesterday")
        write_report(tmp_path, [], comparison(), {})
        assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.png", "report.md", "results.json"]
        assert (tmp_path / "report.md").read_text() != "of yesterday"

    def test_pictures_are_drawn(self, tmp_path: Path) -> None:
        from loadtest.placement import plots

        plots.plot_against_load(comparison(), IDEAL, "title", tmp_path / "a" / "load.png")
        plots.plot_beside_ideal(comparison(), IDEAL, "title", tmp_path / "ideal.png")
        plots.plot_hit_rate([100, 1000], [0.1, 0.2], "title", tmp_path / "hits.png")
        for name in ("a/load.png", "ideal.png", "hits.png"):
            assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


class TestGridSpec:
    def test_every_combination_is_a_cell_and_policies_of_one_window_follow_each_other(self) -> None:
        spec = GridSpec((WORKLOAD,), (IDEAL, OURS), replicas=(4, 16), loads=(0.5, 1.0), seeds=(0, 1, 2))
        cells = spec.cells()
        assert len(cells) == len({(setting, policy, cell) for setting, policy, cell in cells}) == 24
        for (_, _, first), (_, _, second) in zip(cells[::2], cells[1::2], strict=True):
            assert first == replace(second, policy="ideal", router_options=())

    def test_an_ideal_has_no_routers_to_vary(self) -> None:
        spec = GridSpec((WORKLOAD,), (IDEAL, OURS), replicas=(4,), loads=(0.5,), seeds=(0,), routers=(1, 2))
        assert len(spec.cells()) == 4
        assert len({cell for _, _, cell in spec.cells()}) == 3
