"""Many cells: run in parallel processes, kept as they finish, taken up again where they stopped.

Knows cells and processes; knows neither policies nor what the results say.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Protocol

from cache.counted import counted
from cache.errors import ServingError
from loadtest.placement.errors import CellsFailed, Stopped, UnreadableResult
from loadtest.placement.store import ResultStore
from loadtest.placement.workers import end_at_once, worker_pool
from loadtest.simulation.cell import CellResult, CellSpec
from loadtest.workloads.errors import WorkloadError

# One process that is killed (for its memory, say) takes the cells of the others with it.
_PROCESS_DIED = "its process died, or the one beside it; the same command tries it again"

RunCell = Callable[[CellSpec], CellResult]


class GridObserver(Protocol):
    """Told what happens, in the calling process, one call at a time; must not block for long."""

    def kept(self, spec: CellSpec, result: CellResult) -> None:
        """One cell need not run: its result is there. All of these come before `started`."""

    def unreadable(self, error: UnreadableResult) -> None:
        """One result is there and damaged; its cell runs again."""

    def started(self, num_cells: int, num_kept: int) -> None:
        """What is missing runs from now on."""

    def finished(self, spec: CellSpec, result: CellResult) -> None:
        """One cell has its result."""

    def failed(self, spec: CellSpec, error: str) -> None: ...

    def stopping(self, num_running: int) -> None:
        """Ctrl-C: no further cell begins; those under way are waited for."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What runs cells, and where results go."""

    run_cell: RunCell  # importable by name: it runs in other processes
    store: ResultStore
    num_workers: int

    def run(self, specs: Sequence[CellSpec], observer: GridObserver) -> None:
        """Give every cell a result, told to the observer and in the store, where files may go away later.

        All cells are tried, whatever fails. Raises CellsFailed if one has no result, NotKept, at once, if the
        store takes none, Stopped on Ctrl-C; a second Ctrl-C does not wait for the cells under way.
        """
        missing = [spec for spec in specs if not self._is_kept(spec, observer)]
        observer.started(len(specs), len(specs) - len(missing))
        if missing:
            self._run_missing(missing, len(specs) - len(missing), len(specs), observer)

    def _is_kept(self, spec: CellSpec, observer: GridObserver) -> bool:
        """Tells the observer what there is."""
        try:
            result = self.store.load(spec)
        except UnreadableResult as error:
            observer.unreadable(error)
            return False
        if result is not None:
            observer.kept(spec, result)
        return result is not None

    def _run_missing(
        self, missing: Sequence[CellSpec], num_kept: int, num_cells: int, observer: GridObserver
    ) -> None:
        failures: list[tuple[str, str]] = []
        num_finished = num_kept
        pool = _Pool(self.run_cell, self.num_workers, missing)
        try:
            for spec, outcome in pool.outcomes(observer):
                if isinstance(outcome, CellResult):
                    self.store.save(spec, outcome)
                    num_finished += 1
                    observer.finished(spec, outcome)
                else:
                    failures.append((describe(spec), outcome))
                    observer.failed(spec, outcome)
        finally:
            pool.close()
        if pool.is_stopped:
            raise Stopped(num_finished, num_cells)
        if failures:
            raise CellsFailed(failures, num_finished)


class _Pool:
    """Worker processes, given just as many cells as keep them busy: stopping takes one cell's time."""

    def __init__(self, run_cell: RunCell, num_workers: int, specs: Sequence[CellSpec]) -> None:
        self._run_cell = run_cell
        self._num_workers = num_workers
        self._waiting = deque(specs)
        self._executor = worker_pool(num_workers)
        self._running: dict[Future[CellResult | str], CellSpec] = {}
        self.is_stopped = False

    def outcomes(self, observer: GridObserver) -> Iterator[tuple[CellSpec, CellResult | str]]:
        """Each cell with its result or its error, as they end."""
        self._hand_out()
        while self._running:
            try:
                done, _ = wait(self._running, return_when=FIRST_COMPLETED)
            except KeyboardInterrupt:
                if self.is_stopped:
                    return
                self.is_stopped = True
                observer.stopping(len(self._running))
                continue
            yield from [(self._running.pop(future), _outcome(future)) for future in done]
            if not self.is_stopped:
                self._hand_out()

    def close(self) -> None:
        """Cells that nobody waits for any more die with their processes."""
        if self._running:
            end_at_once(self._executor)
        else:
            self._executor.shutdown()

    def _hand_out(self) -> None:
        """One more than there are workers: a worker that ends finds its next cell at once."""
        while self._waiting and len(self._running) <= self._num_workers:
            try:
                future = self._executor.submit(_run_safely, self._run_cell, self._waiting[0])
            except BrokenProcessPool:  # one has died, and all others of this executor with it
                if self._running:  # each is about to say so
                    return
                self._executor.shutdown(wait=False)
                self._executor = worker_pool(self._num_workers)
            else:
                self._running[future] = self._waiting.popleft()


def describe(spec: CellSpec) -> str:
    """One cell, for messages."""
    return (
        f"{spec.workload.label}, {spec.policy}, {counted(spec.num_replicas, 'replica')}, load {spec.load:g}, "
        f"seed {spec.seed}, {spec.cache_tokens / 1e6:g}M tokens"
    )


def _run_safely(run_cell: RunCell, spec: CellSpec) -> CellResult | str:
    """In a worker: the result, or as text why there is none: not every exception can be pickled."""
    try:
        return run_cell(spec)
    except (ServingError, WorkloadError) as error:  # says itself what does not fit
        return str(error)
    except Exception:
        return traceback.format_exc()


def _outcome(future: Future[CellResult | str]) -> CellResult | str:
    try:
        return future.result()
    except BrokenProcessPool:
        return _PROCESS_DIED
