"""The router benchmark's rows: which targets apply, what the table and the JSON say of them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import router_report
from benchmarks.router_report import Row, verdicts
from benchmarks.router_timing import Spread, quantile, spread_of

INDEX = "index, 64 replicas, 1,000,000 blocks"
FAST = "decision, 64 replicas, xxh3_128"
STRONG = "decision, 64 replicas, sha256"


def spread(p50_us: float, p99_us: float = 0.0, max_us: float = 0.0) -> Spread:
    return Spread(p50_us, p99_us, max_us, p50_us, p99_us, 100)


@pytest.mark.parametrize(
    ("row", "limit"),
    [
        (Row(INDEX, "match 8k, cold", spread(0)), 10),
        (Row(INDEX, "match 8k, half", spread(0)), 10),
        (Row(INDEX, "match 1k, half", spread(0)), None),
        (Row("index, 8 replicas, 1,000,000 blocks", "match 8k, half", spread(0)), None),
        (Row(FAST, "whole 8k, half", spread(0)), 200),
        (Row(FAST, "whole 32k, half", spread(0)), None),
        (Row(STRONG, "whole 8k, cold", spread(0)), 400),
        (Row(STRONG, "whole 8k, next turn", spread(0)), 200),
        (Row(FAST, "queued 8k, half", spread(0)), 200),
        (Row(STRONG, "queued 8k, half", spread(0)), 400),
        (Row(FAST, "hash 8k", spread(0)), None),
    ],
)
def test_each_target_applies_where_it_was_set(row: Row, limit: float | None) -> None:
    found = verdicts(row)
    assert [verdict.required for verdict in found] == ([f"<= {limit} us"] if limit else [])
    assert all(verdict.is_reached for verdict in found)


@pytest.mark.parametrize(
    ("row", "is_reached"),
    [
        (Row(INDEX, "match 8k, all", spread(10.1)), False),
        (Row(INDEX, "bytes per block, process growth", amount=60.0), True),
        (Row(INDEX, "bytes per block, process growth", amount=60.1), False),
        (Row(INDEX, "byte gauge / process growth", amount=0.91), True),
        (Row(INDEX, "byte gauge / process growth", amount=1.11), False),
        (Row(INDEX, "a replica leaves", spread(50, 60, 2001)), False),
        (Row("event loop, 64 requests", "stall, CPU time between two looks", spread(1, 1999)), True),
        (Row("event loop, 64 requests", "stall, CPU time between two looks", spread(1, 2001)), False),
    ],
)
def test_a_target_is_reached_or_missed(row: Row, is_reached: bool) -> None:
    (verdict,) = verdicts(row)
    assert verdict.is_reached is is_reached


ROWS = [
    Row(INDEX, "bytes per block, process growth", amount=35.0, ray_amount=70.0),
    Row(INDEX, "match 8k, half", spread(12.0, 40.0), spread(600.0, 700.0), note="a note"),
    Row(FAST, "whole 8k, cold", spread(150.0, 250.0)),
]


def test_the_table_shows_ratios_and_targets_in_a_hundred_columns() -> None:
    out = io.StringIO()
    Console(file=out, width=router_report.WIDTH).print(router_report.table(ROWS))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    (match,) = [line for line in lines if "match 8k" in line]
    assert match.split()[3:] == ["12.0", "40.0", "600", "700", "50.0x", "≤10", "us", "missed"]
    (memory,) = [line for line in lines if "bytes per block" in line]
    assert "2.00x" in memory
    assert "reached" in memory


def test_the_summary_names_what_was_missed() -> None:
    first, *missed = router_report.summary(ROWS)
    assert first == "Targets reached: 2 of 3."
    assert missed == [f"Missed: {INDEX}: match 8k, half p50 is 12.0 us, wanted <= 10 us."]


def test_the_json_holds_both_clocks_and_the_verdicts(tmp_path: Path) -> None:
    router_report.write_json(tmp_path / "out.json", ROWS, {"blocks": 1})
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["conditions"] == {"blocks": 1}
    assert document["rows"][1]["ray"]["wall_p50_us"] == 600.0
    assert document["rows"][1]["verdicts"][0]["is_reached"] is False


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [quantile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert quantile([7.0], 0.99) == 7.0


def test_every_call_is_made_once_in_order() -> None:
    made: list[int] = []
    result = spread_of([lambda n=n: made.append(n) for n in range(20)])  # type: ignore[misc]
    assert made == list(range(20))
    assert result.num_calls == 20
    assert 0.0 <= result.p50_us <= result.p99_us <= result.max_us
