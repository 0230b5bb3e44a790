"""From cells to figures, whatever happens to the folder that results are kept in."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loadtest.placement import experiment
from loadtest.placement.comparison import Comparison, mean_ttft_s
from loadtest.placement.errors import CellsFailed
from loadtest.placement.experiment import Output, conditions, run_experiment, run_grid
from loadtest.placement.grid import describe
from loadtest.placement.policy_choice import PolicyChoice
from loadtest.placement.report import told_too_late
from loadtest.placement.store import ResultStore
from loadtest.placement.suites import GridSpec
from loadtest.placement.summary import summarize
from loadtest.simulation.cell import CellResult, CellSpec, Failure, Scaling
from loadtest.simulation.machine import H100_8B
from loadtest.workloads.reference import WorkloadRef
from tests.fakes.placement import TRACE_LINE, WORKLOAD, fake_result, run_fake, run_while_it_is_recorded

POLICIES = (PolicyChoice("ideal"), PolicyChoice("round_robin"))
SPEC = GridSpec((WORKLOAD,), POLICIES, replicas=(4,), loads=(0.5,), seeds=(0, 1))


CHANGES: list[dict[str, Any]] = [
    {"failures": (Failure(60.0, 0),)},
    {"failures": (Failure(60.0, 1),)},
    {"failures": (Failure(61.0, 0),)},
    {"failures": (Failure(60.0, 0, 20.0),)},
    {"slowdowns": (1.5,)},
    {"slowdowns": (1.0, 1.5)},
    {"scalings": (Scaling(120.0, 6),)},
    {"scalings": (Scaling(120.0, 5),)},
    {"scalings": (Scaling(121.0, 6),)},
    {"has_kv_events": False},
    {"event_delay_s": 0.006},
    {"dispatch_delay_s": 0.002},
    {"seeds": (0,)},
    {"machine": replace(H100_8B, max_model_len=4096)},
    {"workloads": (WorkloadRef("no_reuse", num_requests=17),)},
    {"workloads": (WorkloadRef("here/no_reuse.jsonl", num_requests=16),)},
    {"workloads": (WorkloadRef("there/no_reuse.jsonl", num_requests=16),)},
]


def test_heads_of_reports_tell_what_was_simulated() -> None:
    """Failures, slow replicas and changes of the fleet were not told."""
    heads = [json.dumps(conditions(replace(SPEC, **changes), 1.0)) for changes in [{}, *CHANGES]]
    assert len(set(heads)) == len(heads)
    told = conditions(replace(SPEC, failures=(Failure(60.0, 0), Failure(70.0, 1, 5.0))), 1.0)
    assert told["replicas die"] == "r0 at 60 s, r1 at 70 s for 5 s"


def test_one_replica_is_told_in_the_singular() -> None:
    told = conditions(replace(SPEC, scalings=(Scaling(120.0, 1),)), 1.0)
    assert told["the fleet changes"] == "to 1 replica at 120 s"
    cell = CellSpec(WORKLOAD, num_replicas=1, load=0.5, seed=0)
    assert ", 1 replica, load 0.5" in describe(cell)


def compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Comparison, str]:
    """And what is said meanwhile."""
    monkeypatch.setattr(experiment, "run_cell", run_fake)
    said = StringIO()
    console = Console(file=said, width=400)
    return run_grid(SPEC, Output(results=folder, num_workers=1), console), said.getvalue()


def test_results_that_go_away_meanwhile_are_in_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grid had computed everything, and ended in a traceback."""

    class Tidied(ResultStore):
        def save(self, spec: CellSpec, result: CellResult) -> None:
            super().save(spec, result)
            shutil.rmtree(self.folder)

    monkeypatch.setattr(experiment, "ResultStore", Tidied)
    comparison, _ = compared(tmp_path / "cells", monkeypatch)
    (setting,) = comparison.settings
    assert [comparison.mean(setting, policy, mean_ttft_s) for policy in POLICIES] == pytest.approx(
        [0.5 * 1.005, 1.005]
    )
    assert not list(tmp_path.iterdir())


def test_a_trace_that_grows_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process read what was there when it began: policies were compared on different requests, and kept
    under the name of the first content."""
    trace = tmp_path / "recording.jsonl"
    trace.write_text(TRACE_LINE % 0 + TRACE_LINE % 3_000)
    spec = replace(SPEC, workloads=(WorkloadRef(str(trace), num_requests=16),), seeds=(0,))
    monkeypatch.setattr(experiment, "run_cell", run_while_it_is_recorded)
    with pytest.raises(CellsFailed, match=r"recording\.jsonl: changes while it is simulated, .*: copy it"):
        run_grid(spec, Output(results=tmp_path / "cells", num_workers=1), Console(file=StringIO()))
    assert not (tmp_path / "cells").exists()


def test_a_damaged_result_is_a_warning_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(tmp_path, monkeypatch)
    damaged = sorted(tmp_path.iterdir())[0]
    damaged.write_bytes(b"")
    _, said = compared(tmp_path, monkeypatch)
    assert f"warning: {damaged} cannot be read" in said
    assert "3 of 4 cells finished already" in said
    _, said = compared(tmp_path, monkeypatch)
    assert "warning" not in said


def test_what_changes_after_a_windows_last_request_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report said that a replica dies at 60 s, and its window was over by then. Here it is at 15 s."""
    monkeypatch.setattr(experiment, "run_cell", run_fake)
    written = StringIO()
    spec = replace(SPEC, failures=(Failure(1.0, 0),), scalings=(Scaling(15.5, 6),))
    output = Output(tmp_path / "cells", tmp_path / "report", with_plots=False, num_workers=1)
    run_experiment(spec, output, Console(file=written, width=160))
    for told in (written.getvalue(), (tmp_path / "report" / "report.md").read_text()):
        assert "no_reuse 4@0.5 (15.0 s)" in told


def test_what_changes_while_requests_come_is_not() -> None:
    comparison = Comparison()
    for setting, policy, cell in SPEC.cells():
        comparison.add(setting, policy, cell.seed, summarize(fake_result(cell), cell.num_replicas))
    assert not told_too_late(comparison, [])
    assert not told_too_late(comparison, [1.0, 15.0])
