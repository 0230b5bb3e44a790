"""What is made of samples: what counts as added, and which targets apply where."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path as FilePath

import pytest
from rich.console import Console

from benchmarks.overhead import report
from benchmarks.overhead.cells import Cell, Path, Plan, Prompt, cells_of
from benchmarks.overhead.modes import Mode
from benchmarks.overhead.results import Row, rows_of
from benchmarks.overhead.samples import Idle, Part, Run, Sample, Tokenizing

REQUESTS, STREAMS = Cell(Prompt.SMALL, 1, 1), Cell(Prompt.SMALL, 8, 100)


def cpu(proxy: float, router: float, replica: float) -> dict[Part, float]:
    return {Part.PROXY: proxy, Part.ROUTER: router, Part.REPLICA: replica}


IDLE = cpu(0.01, 0.02, 0.03)


def run(
    path: Path,
    cpu_s: dict[Part, float],
    *,
    mode: Mode = Mode.FAST,
    cell: Cell = STREAMS,
    first_s: float = 0.01,
    pieces: int = 20,
) -> Run:
    """Ten requests in a second."""
    return Run(mode, cell, path, (Sample(first_s, pieces),) * 10, 1.0, cpu_s)


def rows(*runs: Run, tokenizing: float = 0.0) -> list[Row]:
    idle = [Idle(mode, IDLE) for mode in Mode]
    return rows_of(runs, idle, [Tokenizing(Prompt.LONG, tokenizing)])


def test_what_idle_servers_use_and_what_a_direct_call_takes_is_not_added() -> None:
    (row,) = rows(run(Path.DIRECT, cpu(0.01, 0.03, 0.13)), run(Path.HTTP, cpu(0.02, 0.10, 0.14)))
    assert row.direct.cpu_ms == pytest.approx(cpu(0.0, 1.0, 10.0))
    assert row.http.cpu_ms == pytest.approx(cpu(1.0, 8.0, 11.0))
    assert row.http.whole_cpu_ms == pytest.approx(20.0)
    assert row.added_cpu_ms == pytest.approx(cpu(1.0, 7.0, 1.0))
    assert row.all_added_cpu_ms == pytest.approx(9.0)
    assert row.hearing_cpu_ms == pytest.approx(1.0)


def test_repeats_are_one_sample() -> None:
    (row,) = rows(
        run(Path.DIRECT, IDLE),
        run(Path.HTTP, cpu(0.03, 0.02, 0.03), first_s=0.02),
        run(Path.HTTP, cpu(0.01, 0.02, 0.03), first_s=0.04),
        run(Path.DIRECT, IDLE),
    )
    assert (row.http.num_requests, row.direct.num_requests) == (20, 20)
    assert row.all_added_cpu_ms == pytest.approx(1.0)
    assert row.http.first_p10_ms == pytest.approx(20.0)
    assert row.http.first_p90_ms == pytest.approx(40.0)


def test_a_cell_measured_one_way_only_makes_no_row() -> None:
    assert rows(run(Path.HTTP, IDLE)) == []


@pytest.mark.parametrize(("added_cpu_s", "is_reached"), [(0.099, True), (0.101, False)])
def test_ten_milliseconds_of_cpu_for_a_stream(added_cpu_s: float, is_reached: bool) -> None:
    through = cpu(IDLE[Part.PROXY], IDLE[Part.ROUTER] + added_cpu_s, IDLE[Part.REPLICA])
    (row,) = rows(run(Path.DIRECT, IDLE), run(Path.HTTP, through))
    (verdict,) = row.verdicts
    assert (verdict.required, verdict.is_reached) == ("<= 10 ms", is_reached)


@pytest.mark.parametrize(
    ("prompt", "added_s", "is_reached"),
    [
        (Prompt.SMALL, 0.0049, True),
        (Prompt.SMALL, 0.0051, False),
        (Prompt.LONG, 0.0061, True),  # what is new takes 1.2 ms to tokenize
        (Prompt.LONG, 0.0063, False),
    ],
)
def test_five_milliseconds_to_the_first_token(prompt: Prompt, added_s: float, is_reached: bool) -> None:
    cell = replace(REQUESTS, prompt=prompt)
    (row,) = rows(
        run(Path.DIRECT, IDLE, cell=cell, first_s=0.01),
        run(Path.HTTP, IDLE, cell=cell, first_s=0.01 + added_s),
        tokenizing=0.0012,
    )
    assert [verdict.is_reached for verdict in row.verdicts] == [is_reached]


@pytest.mark.parametrize(("cpu_s", "is_reached"), [(0.59, True), (0.61, False)])
def test_throughput_optimised_beside_default(cpu_s: float, is_reached: bool) -> None:
    def whole(cpu_s: float) -> dict[Part, float]:
        return cpu(IDLE[Part.PROXY] + cpu_s / 2, IDLE[Part.ROUTER], IDLE[Part.REPLICA] + cpu_s / 2)

    found = rows(
        *(run(path, whole(1.0), mode=Mode.DEFAULT) for path in Path),
        *(run(path, whole(cpu_s), mode=Mode.THROUGHPUT) for path in Path),
    )
    assert [[verdict.is_reached for verdict in row.verdicts] for row in found] == [[], [is_reached]]


def test_other_coalescing_is_not_compared() -> None:
    """A mode that falls behind merges more tokens per piece, which is cheaper."""
    found = rows(
        *(run(path, cpu(1, 1, 1), mode=Mode.DEFAULT, pieces=10) for path in Path),
        *(run(path, cpu(2, 2, 2), mode=Mode.THROUGHPUT, pieces=20) for path in Path),
    )
    assert [row.verdicts for row in found] == [(), ()]


def test_the_modes_own_targets_only() -> None:
    for mode in (Mode.DEFAULT, Mode.THROUGHPUT):
        (row,) = rows(*(run(path, cpu(1, 1, 1), mode=mode) for path in Path))
        assert row.verdicts == ()


def test_plans_ask_enough_at_every_concurrency() -> None:
    cells = cells_of(tuple(Prompt), (1, 64))
    assert len(cells) == 8
    plan = Plan(cells, repeats=1, requests=60, streams=4, idle_s=1.0)
    asked = {(cell.concurrency, cell.output_tokens): plan.num_requests(cell) for cell in cells}
    assert asked == {(1, 1): 60, (1, 100): 4, (64, 1): 256, (64, 100): 128}


ROWS = rows(
    *(run(path, cpu(1, 1, 1), mode=Mode.DEFAULT) for path in Path),
    run(Path.DIRECT, IDLE),
    run(Path.HTTP, cpu(0.02, 0.2, 0.03), first_s=0.0162),
    run(Path.DIRECT, IDLE, cell=REQUESTS),
    run(Path.HTTP, IDLE, cell=REQUESTS, first_s=0.0132),
)


def test_the_table_shows_target_beside_measured_in_a_hundred_columns() -> None:
    out = io.StringIO()
    Console(file=out, width=report.WIDTH).print(report.table(ROWS))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in out.getvalue()
    streams = [line for line in lines if "small, 8" in line][-1].split()
    assert streams == [
        *("small,", "8", "10.0", "6.2", "6.2", "6.2"),
        *("1.0", "18.0", "0.0", "19.0", "19.0", "20.0", "19.0≤10", "missed"),
    ]
    assert next(line for line in lines if "small, 1" in line).rstrip().endswith("3.2≤5 reached")


def test_the_summary_names_what_was_missed() -> None:
    first, missed = report.summary(ROWS)
    assert first == "Targets reached: 1 of 2."
    assert missed.startswith(
        "Missed: throughput-optimised, fast proxy (HAProxy), small prompts, 100-token streams"
    )
    assert missed.endswith("CPU added per stream is 19.0 ms, wanted <= 10 ms.")
    assert report.summary(ROWS[:1])[0].startswith("No targets")


def test_what_is_not_added_is_said() -> None:
    idle, heard = Idle(Mode.FAST, IDLE), run(Path.DIRECT, cpu(0.01, 0.05, 0.13))
    found = rows(heard, run(Path.HTTP, IDLE))
    (line,) = report.background(found, [idle])
    assert "idle, CPU-ms a second: proxy 10, Router 20, replica 30" in line
    assert line.endswith("per stream: 3.0 (small, 8).")
    assert report.background([], [idle])[0].endswith("replica 30.")


def test_what_the_mode_can_change_is_compared_by_itself() -> None:
    """Engines are in every stream's CPU, and no mode makes them cheaper."""
    found = rows(
        *(run(path, cpu(0.21, 0.22, 0.53), mode=Mode.DEFAULT) for path in Path),
        *(run(path, cpu(0.11, 0.12, 0.53), mode=Mode.THROUGHPUT) for path in Path),
    )
    (line,) = report.beside_default(found)
    assert line.endswith("CPU per stream: 0.50x (small, 8).")
    assert report.beside_default(found[1:]) == []


def test_serves_own_way_for_pieces_is_a_line_of_its_own_and_no_target() -> None:
    found = rows(
        *(run(path, cpu(0.51, 0.52, 1.03), mode=Mode.CALLS) for path in Path),
        *(run(path, cpu(0.11, 0.42, 0.53), mode=Mode.THROUGHPUT) for path in Path),
    )
    (line,) = report.beside_default(found)
    assert line == "throughput over default by calls, engines included, CPU per stream: 0.50x (small, 8)."
    assert not any(row.verdicts for row in found)
    merged = rows(
        *(run(path, cpu(0.51, 0.52, 1.03), mode=Mode.CALLS, pieces=26) for path in Path),
        *(run(path, cpu(0.11, 0.42, 0.53), mode=Mode.THROUGHPUT) for path in Path),
    )
    assert report.beside_default(merged) == []  # in other pieces it is another stream


def test_the_documents_table_has_every_row() -> None:
    lines = report.markdown(ROWS).splitlines()
    assert len([line for line in lines if line.startswith("| small")]) == 3
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert any("19.0 ms, **missed**" in line for line in lines)


def test_the_json_holds_what_was_measured(tmp_path: FilePath) -> None:
    report.write_json(tmp_path / "out.json", ROWS, {"replicas": 2})
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["conditions"] == {"replicas": 2}
    row = document["rows"][1]
    assert row["cell"] == {"prompt": "small", "concurrency": 8, "output_tokens": 100}
    assert row["http"]["cpu_ms"]["Router"] == pytest.approx(18.0)
    assert row["verdicts"][0]["is_reached"] is False


def test_the_plot_is_drawn(tmp_path: FilePath) -> None:
    report.plot(tmp_path / "out.png", ROWS)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
