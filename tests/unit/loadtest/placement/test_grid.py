"""Cells run in other processes; what is finished is kept, whatever happens to the others."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest.placement import grid
from loadtest.placement.errors import CellsFailed, NotKept, Stopped, UnreadableResult
from loadtest.placement.grid import Grid, RunCell
from loadtest.placement.store import ResultStore
from loadtest.simulation.cell import CellResult, CellSpec
from loadtest.simulation.run import run_cell
from loadtest.workloads.reference import WorkloadRef
from tests.fakes.placement import (
    LOG_VARIABLE,
    fake_result,
    fake_spec,
    run_but_die_for_seed_1,
    run_but_fail_for_seed_1,
    run_fake,
    run_slowly,
)


class Watcher:
    def __init__(self) -> None:
        self.num_cells = self.num_kept = self.num_stopping = 0
        self.results: list[CellSpec] = []
        self.errors: list[str] = []
        self.damaged: list[Path] = []

    def kept(self, spec: CellSpec, result: CellResult) -> None:
        self.finished(spec, result)

    def unreadable(self, error: UnreadableResult) -> None:
        self.damaged.append(error.path)

    def started(self, num_cells: int, num_kept: int) -> None:
        self.num_cells, self.num_kept = num_cells, num_kept

    def finished(self, spec: CellSpec, result: CellResult) -> None:
        assert np.array_equal(result.ttft_s, fake_result(spec).ttft_s)
        self.results.append(spec)

    def failed(self, spec: CellSpec, error: str) -> None:
        self.errors.append(error)

    def stopping(self, num_running: int) -> None:
        self.num_stopping += 1


SPECS = [fake_spec(seed=seed) for seed in range(4)]


def run(folder: Path, run_cell: RunCell, specs: list[CellSpec] = SPECS) -> Watcher:
    watcher = Watcher()
    Grid(run_cell, ResultStore(folder), num_workers=2).run(specs, watcher)
    return watcher


def test_every_cell_runs_once_and_then_never_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv(LOG_VARIABLE, str(log))
    first = run(tmp_path / "cells", run_fake, SPECS[:2])
    assert (first.num_cells, first.num_kept) == (2, 0)
    second = run(tmp_path / "cells", run_fake)  # two more
    assert (second.num_cells, second.num_kept) == (4, 2)
    assert sorted(second.results, key=lambda spec: spec.seed) == SPECS
    assert sorted(log.read_text().splitlines()) == [f"expected_time {seed}" for seed in range(4)]


def test_a_resumed_grid_says_what_a_fresh_one_says(tmp_path: Path) -> None:
    run(tmp_path / "resumed", run_fake, SPECS[:1])
    run(tmp_path / "resumed", run_fake)
    run(tmp_path / "fresh", run_fake)
    for spec in SPECS:
        resumed, fresh = (ResultStore(tmp_path / name).load(spec) for name in ("resumed", "fresh"))
        assert resumed is not None
        assert fresh is not None
        for name in CellResult.__dataclass_fields__:
            assert np.array_equal(getattr(resumed, name), getattr(fresh, name)), name


def test_a_damaged_result_is_told_and_its_cell_runs_again(tmp_path: Path) -> None:
    run(tmp_path, run_fake)
    path = ResultStore(tmp_path).path(SPECS[1])
    path.write_bytes(b"")
    again = run(tmp_path, run_fake)
    assert (again.num_kept, again.damaged) == (3, [path])
    assert sorted(again.results, key=lambda spec: spec.seed) == SPECS
    assert ResultStore(tmp_path).load(SPECS[1]) is not None


def test_a_store_that_takes_nothing_ends_the_grid_and_keeps_what_it_has(tmp_path: Path) -> None:
    class Full(ResultStore):
        def save(self, spec: CellSpec, result: CellResult) -> None:
            if len(list(self.folder.iterdir())) == 2:
                raise NotKept(self.path(spec), "No space left on device")
            super().save(spec, result)

    tmp_path.joinpath("cells").mkdir()
    watcher = Watcher()
    with pytest.raises(NotKept):
        Grid(run_fake, Full(tmp_path / "cells"), num_workers=2).run(SPECS, watcher)
    assert len(watcher.results) == 2
    assert run(tmp_path / "cells", run_fake).num_kept == 2


def test_a_failing_cell_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    with pytest.raises(CellsFailed, match=r"expected_time, 4 replicas, load 0\.5, seed 1") as caught:
        run(tmp_path, run_but_fail_for_seed_1)
    assert "seed 1 is not liked" in str(caught.value)
    assert caught.value.num_finished == 3
    store = ResultStore(tmp_path)
    assert [store.load(spec) is not None for spec in SPECS] == [True, False, True, True]


def test_what_does_not_fit_says_so_in_a_line(tmp_path: Path) -> None:
    """A cache too small for a request is no defect of ours: no traceback."""
    spec = CellSpec(WorkloadRef("no_reuse", num_requests=20), 1, 0.6, 0, "round_robin", cache_tokens=1)
    with pytest.raises(CellsFailed, match="cache_tokens = 1: the largest request takes") as caught:
        run(tmp_path, run_cell, [spec])
    assert "Traceback" not in str(caught.value)


def test_a_process_that_dies_ends_neither_the_grid_nor_finished_cells(tmp_path: Path) -> None:
    with pytest.raises(CellsFailed, match="process died"):
        run(tmp_path, run_but_die_for_seed_1)
    # Cells beside the one that died may have gone with it: trying again gets them.
    with pytest.raises(CellsFailed) as caught:
        run(tmp_path, run_but_die_for_seed_1, [*SPECS[:1], *SPECS[2:], SPECS[1]])
    assert caught.value.num_finished >= 2
    assert run(tmp_path, run_fake).num_kept >= 2


class DiesBetween(ThreadPoolExecutor):
    """A pool whose process dies after so many cells, before it is given another."""

    def __init__(self, num_cells: int, is_computed: bool) -> None:
        super().__init__(1)
        self.left, self.is_computed = num_cells, is_computed

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not self.left:
            raise BrokenProcessPool
        self.left -= 1
        return super().submit(fn if self.is_computed else die, *args, **kwargs)


def die(*_: object) -> None:
    raise BrokenProcessPool


@pytest.mark.parametrize(("is_computed", "num_finished"), [(False, 2), (True, 4)])
def test_a_process_that_dies_before_it_is_given_a_cell_takes_only_those_it_had(
    is_computed: bool, num_finished: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = iter([DiesBetween(2, is_computed), DiesBetween(9, is_computed=True)])
    monkeypatch.setattr(grid, "worker_pool", lambda num_workers: next(pools))
    watcher = Watcher()
    with nullcontext() if is_computed else pytest.raises(CellsFailed, match="process died"):
        Grid(run_fake, ResultStore(tmp_path), num_workers=2).run(SPECS, watcher)
    assert len(watcher.results) == num_finished


def test_ctrl_c_keeps_what_is_finished_and_begins_nothing_new(tmp_path: Path) -> None:
    specs = [fake_spec(seed=seed) for seed in range(100, 160)]
    watcher = Watcher()
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))

    class Interrupting(Watcher):
        def finished(self, spec: CellSpec, result: CellResult) -> None:
            super().finished(spec, result)
            if len(self.results) == 2:
                interrupt.start()  # while the grid waits for the next

    watcher = Interrupting()
    with pytest.raises(Stopped) as caught:
        Grid(run_slowly, ResultStore(tmp_path), num_workers=2).run(specs, watcher)
    interrupt.join()
    assert watcher.num_stopping == 1
    assert 2 <= len(watcher.results) <= 12
    assert f"{len(watcher.results)} of 60 cells kept" in str(caught.value)
    store = ResultStore(tmp_path)
    assert all(store.load(spec) is not None for spec in watcher.results)
