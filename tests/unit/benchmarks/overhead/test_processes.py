"""Whose CPU time is counted: found by process titles below one process, read from a /proc of our own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.overhead.processes import ServerProcesses, difference
from benchmarks.overhead.samples import Part

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def process(proc: Path, pid: int, parent: int, title: str, user: int = 0, system: int = 0) -> None:
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "cmdline").write_bytes(title.encode() + b"\0-f\0file\0")
    fields = ["S", str(parent), *["0"] * 9, str(user), str(system), "0"]
    (folder / "stat").write_text(f"{pid} (a (strange) name) {' '.join(fields)}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text("")
    process(tmp_path, 10, 1, "python", user=1000)
    process(tmp_path, 11, 10, "/path/to/raylet", user=1000)
    process(tmp_path, 12, 11, "ray::HAProxyManager", user=1)
    process(tmp_path, 13, 12, "/path/to/bin/haproxy", user=2, system=3)
    process(tmp_path, 14, 11, "ray::ServeReplica:warmpath:Router", user=10)
    process(tmp_path, 15, 11, "ray::ServeReplica:warmpath:Replica.generate", user=20)
    process(tmp_path, 16, 11, "ray::ServeReplica:warmpath:Replica", user=30, system=1)
    process(tmp_path, 20, 1, "ray::ServeReplica:warmpath:Router", user=1000)  # somebody else's
    return tmp_path


def test_each_part_is_counted_and_nobody_else(proc: Path) -> None:
    processes = ServerProcesses.below(10, proc)
    before = processes.cpu_s(proc)
    assert {part: round(seconds / TICK_S) for part, seconds in before.items()} == {
        Part.PROXY: 6,
        Part.ROUTER: 10,
        Part.REPLICA: 51,
    }
    process(proc, 14, 11, "ray::ServeReplica:warmpath:Router", user=15, system=2)
    used = difference(processes.cpu_s(proc), before)
    assert {part: round(seconds / TICK_S) for part, seconds in used.items()} == {
        Part.PROXY: 0,
        Part.ROUTER: 7,
        Part.REPLICA: 0,
    }


def test_a_missing_part_is_an_error(proc: Path) -> None:
    (proc / "14" / "cmdline").write_bytes(b"ray::IDLE\0")
    with pytest.raises(LookupError, match="no process of Router"):
        ServerProcesses.below(10, proc)


def test_a_process_that_ends_spoils_the_measurement(proc: Path) -> None:
    processes = ServerProcesses.below(10, proc)
    (proc / "13" / "stat").unlink()
    with pytest.raises(LookupError, match=r"13 .* ended"):
        processes.cpu_s(proc)
