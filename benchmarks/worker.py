"""One contender in a process of its own: its memory and CPU time are nobody else's.

The parent sends jobs and gets runs; between jobs the process sleeps, so contenders can take turns
without disturbing one another.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import traceback
import warnings
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from benchmarks import contenders, memory, models
from benchmarks.cases import ModelSpec
from benchmarks.contender import Job, Run
from benchmarks.contenders import Setup
from benchmarks.stopping import ctrl_c_is_ours

STOP_TIMEOUT_S = 10.0

# Every contender keeps freed memory up to 32 MiB a piece (the most glibc takes) rather than give it back to
# the system and fault it in again. Left to itself glibc settles on either, by the order in which a process
# frees: one and the same step of continuous batching (132M, batch 32) then takes no page fault and 280 ms, or
# 86,000 of them and 500 ms, for the life of that process. Read by glibc alone, when a process starts.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}


class WorkerFailed(Exception):
    """A contender's process raised or died; carries its traceback."""


class Worker:
    """A contender's process. A context manager; the process ends with it."""

    def __init__(
        self, name: str, spec: ModelSpec, models_folder: Path, *, threads: int, num_blocks: int, chunk: int
    ) -> None:
        """Starts importing and returns at once; then `load`, then `wait_until_ready`."""
        self.name = name
        # Set before the child imports torch: its thread pools are sized then.
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
        os.environ.update(ALLOCATOR)
        setup = Setup(models_folder / spec.name, threads, num_blocks, chunk)
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        self._process: SpawnProcess = context.Process(
            target=_main, args=(name, spec, setup, child), name=f"bench-{name}", daemon=True
        )
        with ctrl_c_is_ours():
            self._process.start()
        self._may_be_killed = True  # it imports, or computes what nobody waits for any more
        child.close()

    def load(self) -> None:
        """Load the model, drawing it first if its folder is not there: that, one worker at a time."""
        with contextlib.suppress(BrokenPipeError):  # it is dead: `wait_until_ready` says of what
            self._connection.send(None)

    def wait_until_ready(self) -> None:
        """Wait for `load` to end. Raises WorkerFailed."""
        self._receive()

    def run(self, job: Job) -> Run:
        """Raises WorkerFailed."""
        self._connection.send(job)
        run = self._receive()
        assert isinstance(run, Run)
        return run

    def close(self) -> None:
        """End the process. Idempotent."""
        self._connection.close()  # its next receive ends it
        if self._may_be_killed:
            self._process.kill()
        self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self) -> object:
        self._may_be_killed = True
        try:
            answer = self._connection.recv()
            self._may_be_killed = False
        except (EOFError, ConnectionResetError):
            self._process.join(STOP_TIMEOUT_S)
            raise WorkerFailed(f"{self.name} died, exit status {self._process.exitcode}") from None
        if isinstance(answer, str):
            raise WorkerFailed(f"{self.name} failed:\n{answer}")
        return answer


def _main(name: str, spec: ModelSpec, setup: Setup, connection: Connection) -> None:
    try:
        _quieten()
        connection.recv()
        models.build(spec, setup.folder.parent)
        contender = contenders.load(name, setup)
        memory.reset_peak()
        loaded_bytes = memory.resident_bytes()
        connection.send(None)
        while True:
            job: Job = connection.recv()
            memory.reset_peak()
            run = contender.run(job)
            connection.send(replace(run, peak_bytes=memory.peak_bytes() - loaded_bytes))
    except EOFError:
        return  # the parent has closed its end: done
    except Exception:
        connection.send(traceback.format_exc())


def _quieten() -> None:
    """transformers' advice and progress bars would tear the parent's own."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger().setLevel(logging.ERROR)
    # It counts a missing psutil as an error each time a pool is made, and then does without.
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
