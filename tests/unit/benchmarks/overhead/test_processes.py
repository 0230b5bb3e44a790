"""Whose CPU time is counted: found by process titles below one process, read from a /proc of our own."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from benchmarks.overhead.processes import ServerProcesses, difference, process_cpu_s
from benchmarks.overhead.samples import Part


def process(proc: Path, pid: int, parent: int, title: str) -> None:
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "cmdline").write_bytes(title.encode() + b"\0-f\0file\0")
    fields = ["S", str(parent), *["0"] * 12]
    (folder / "stat").write_text(f"{pid} (a (strange) name) {' '.join(fields)}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text("")
    process(tmp_path, 10, 1, "python")
    process(tmp_path, 11, 10, "/path/to/raylet")
    process(tmp_path, 12, 11, "ray::HAProxyManager")
    process(tmp_path, 13, 12, "/path/to/bin/haproxy")
    process(tmp_path, 14, 11, "ray::ServeReplica:warmpath:Router")
    process(tmp_path, 15, 11, "ray::ServeReplica:warmpath:Replica.generate")
    process(tmp_path, 16, 11, "ray::ServeReplica:warmpath:Replica")
    process(tmp_path, 20, 1, "ray::ServeReplica:warmpath:Router")  # somebody else's
    return tmp_path


def test_each_part_is_counted_and_nobody_else(proc: Path) -> None:
    used_s = {12: 0.1, 13: 0.5, 14: 1.0, 15: 2.0, 16: 3.1, 20: 100.0}
    processes = ServerProcesses.below(10, proc, used_s.__getitem__)
    before = processes.cpu_s()
    assert before == pytest.approx({Part.PROXY: 0.6, Part.ROUTER: 1.0, Part.REPLICA: 5.1})
    used_s[14] += 0.0007
    used_s[20] += 1.0
    used = difference(processes.cpu_s(), before)
    assert used == pytest.approx({Part.PROXY: 0.0, Part.ROUTER: 0.0007, Part.REPLICA: 0.0})


def test_a_missing_part_is_an_error(proc: Path) -> None:
    (proc / "14" / "cmdline").write_bytes(b"ray::IDLE\0")
    with pytest.raises(LookupError, match="no process of Router"):
        ServerProcesses.below(10, proc)


def test_a_process_that_ends_spoils_the_measurement(proc: Path) -> None:
    used_s = {12: 0.1, 13: 0.5, 14: 1.0, 15: 2.0, 16: 3.1}

    def clock(pid: int) -> float:
        if pid not in used_s:
            raise OSError
        return used_s[pid]

    processes = ServerProcesses.below(10, proc, clock)
    del used_s[13]
    with pytest.raises(LookupError, match=r"13 .* ended"):
        processes.cpu_s()


def test_a_process_s_clock_counts_every_thread_and_more_finely_than_proc() -> None:
    """Our own, which the standard library reads, too; a thread's time stays when it has ended."""
    before_s, began_s = process_cpu_s(os.getpid()), time.process_time()
    worker = threading.Thread(target=lambda: sum(range(200_000)))
    worker.start()
    worker.join()
    really_s = time.process_time() - began_s
    used_s = process_cpu_s(os.getpid()) - before_s
    assert 0 < really_s <= used_s
    assert used_s % 0.01 != pytest.approx(0.0, abs=1e-9)


def test_nobody_s_clock_is_an_error() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        process_cpu_s(1 << 22)
