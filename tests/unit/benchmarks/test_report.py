"""The table fits, tells what was reached, and the JSON holds both clocks."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import report
from benchmarks.cases import LARGE, SMALL
from benchmarks.pairs import Ratio
from benchmarks.rows import Row, Verdict
from benchmarks.spans import Span
from loadtest.placement.intervals import Interval

WIDE = Span(12_345.0, 23_456.0)
REACHED = Verdict("steady decode / generate", ">= 1.00x", "1.31x", True)
MISSED = Verdict("steady decode / continuous", ">= 3.00x", "2.81x", False)
ROWS = [
    Row(
        "132M",
        "tokens/s and memory, 128-token prompts",
        "batch 32: steady decode",
        {"warmpath": WIDE, "generate": WIDE, "continuous": WIDE},
        ratios={
            "generate": Ratio(Interval(1.31, 1.28, 1.34), Interval(1.0, 0.9, 1.1), 3),
            "continuous": Ratio(Interval(2.81, 0.0, math.inf), Interval(9.0, 0.0, math.inf), 1),
        },
        verdicts=(REACHED, MISSED),
        note="warmpath differs in 1/2",
    ),
    Row("132M", "tokens/s and memory, 128-token prompts", "batch 32: peak MiB", amounts={"warmpath": 135.4}),
    Row("9M", "time to first token, ms", "4,096: 90 % hit (3,680)", {"warmpath": Span(218.4, 31.25)}),
]


def _printed() -> list[str]:
    out = io.StringIO()
    Console(file=out, width=report.WIDTH).print(report.table(ROWS, [SMALL, LARGE]))
    return out.getvalue().splitlines()


def test_the_table_lines_up_in_a_hundred_columns_and_cuts_nothing() -> None:
    lines = _printed()
    assert max(len(line) for line in lines) <= 100
    assert not [line for line in lines if "…" in line]
    (row,) = [line for line in lines if "batch 32: steady decode" in line]
    assert row.count("23,456 (12,345)") == 3
    assert row.split()[-5:] == ["1.31x", "2.81x", "1.28", "to", "1.34"]


def test_further_targets_and_notes_follow_on_lines_of_their_own() -> None:
    lines = _printed()
    at = next(index for index, line in enumerate(lines) if "steady decode" in line)
    assert [line.strip() for line in lines[at + 1 : at + 3]] == ["≥1.00x reached", "≥3.00x missed"]
    assert " ".join(line.strip() for line in lines[at + 3 : at + 5]) == "warmpath differs in 1/2"


def test_models_and_sections_have_headings_in_the_plans_order() -> None:
    text = "\n".join(_printed())
    assert (
        text.index("9M (8.")
        < text.index("time to first token")
        < text.index("132M (131.")
        < text.index("peak MiB")
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1234, "0.123"),
        (4.567, "4.57"),
        (78.94, "78.9"),
        (345.6, "346"),
        (12345.6, "12,346"),
        (99_999.7, "100k"),
        (1e6, "1,000k"),
    ],
)
def test_numbers_have_three_digits_or_more(value: float, text: str) -> None:
    assert report.number(value) == text


def test_the_summary_names_what_was_missed() -> None:
    level, outputs, first, second = report.summary(ROWS)
    assert level == "At or above generate (95 %, CPU time): 1 of 1 cells."
    assert outputs.endswith("batch 32: steady decode: warmpath differs in 1/2.")
    assert first == "Targets reached: 1 of 2."
    assert second.startswith("Missed: 132M, tokens/s and memory, 128-token prompts, batch 32: steady decode:")
    assert second.endswith("steady decode / continuous is 2.81x, wanted >= 3.00x.")
    assert report.summary(ROWS[2:]) == ["No targets: they are for the 132M model."]


@pytest.mark.parametrize(
    ("low", "high", "num_pairs", "said", "shown"),
    [
        (0.90, 0.95, 3, "Below:", "0.90 to 0.95 below"),
        (0.99, 1.05, 3, "Cannot tell:", "0.99 to 1.05 cannot tell"),
        (0.0, math.inf, 1, "Cannot tell:", "one pair: cannot tell"),
    ],
)
def test_what_is_not_at_or_above_generate_is_told(
    low: float, high: float, num_pairs: int, said: str, shown: str
) -> None:
    ratio = Ratio(Interval(0.93, low, high), Interval(1.2, 1.1, 1.3), num_pairs)
    row = replace(ROWS[0], ratios={"generate": ratio}, verdicts=(), note="")
    level, line, *_ = report.summary([row])
    assert level == "At or above generate (95 %, CPU time): 0 of 1 cells."
    assert line.startswith(f"{said} 132M, ")
    assert line.endswith(f"over {num_pairs} pairs.")
    out = io.StringIO()
    Console(file=out, width=report.WIDTH).print(report.table([row], [LARGE]))
    assert shown in " ".join(out.getvalue().replace("batch 32: steady decode", "").split())


def test_the_markdown_has_a_table_per_section() -> None:
    lines = report.markdown(ROWS).splitlines()
    assert [line for line in lines if line.startswith("**")] == [
        "**132M, tokens/s and memory, 128-token prompts**",
        "**9M, time to first token, ms**",
    ]
    (decode,) = [line for line in lines if "steady decode" in line]
    assert decode == (
        "| batch 32: steady decode | 23,456 | 23,456 | 23,456 | 1.31 (1.28 to 1.34) | 3 | 2.81 "
        "| target ≥ 1.00x reached; target ≥ 3.00x **missed**; warmpath differs in 1/2 |"
    )
    assert {line.count("|") for line in lines if line.startswith("|")} == {9}


def test_the_json_holds_every_value_and_the_conditions(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    report.write_json(path, ROWS, {"machine": "here"})
    document = json.loads(path.read_text())
    assert document["conditions"] == {"machine": "here"}
    assert document["rows"][0]["values"]["generate"] == {"wall_s": 12_345.0, "cpu_s": 23_456.0}
    assert document["rows"][0]["ratios"]["generate"]["cpu"] == [1.31, 1.28, 1.34]
    assert document["rows"][0]["verdicts"][1]["is_reached"] is False
    assert document["rows"][2]["label"] == "4,096: 90 % hit (3,680)"
