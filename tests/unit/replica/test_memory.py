"""Free memory from the system's own files, as this machine, a container or none of them writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from replica.memory import free_host_bytes, human_bytes

MIB = 1 << 20


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:  8388608 kB\nMemFree:  100 kB\nMemAvailable:  4194304 kB\nCached: 7 kB\n")
    return path


def cgroup(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def second_version(limit: str, usage: int, inactive: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{usage}\n",
        "memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 9\n",
    }


def test_the_kernels_estimate_counts_without_a_container(meminfo: Path, tmp_path: Path) -> None:
    assert free_host_bytes(meminfo, tmp_path / "none") == 4096 * MIB


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (second_version("max", 3 * MIB), 4096 * MIB),
        (second_version(str(1024 * MIB), 1000 * MIB), 24 * MIB),
        (second_version(str(1024 * MIB), 1000 * MIB, inactive=100 * MIB), 124 * MIB),  # page cache can go
        (second_version(str(9000 * MIB), 0), 4096 * MIB),  # the machine itself has less
        (second_version(str(10 * MIB), 11 * MIB), 0),  # over its limit: nothing, not less than nothing
        (second_version("nonsense", 1), 4096 * MIB),
    ],
    ids=["no-limit", "limit", "page-cache", "larger-than-machine", "over", "unreadable"],
)
def test_a_containers_limit_cuts_it(
    meminfo: Path, tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    assert free_host_bytes(meminfo, cgroup(tmp_path / "cg", files)) == expected


@pytest.mark.parametrize(("limit", "expected"), [(1 << 62, 4096 * MIB), (512 * MIB, 112 * MIB)])
def test_the_first_version_of_control_groups(
    meminfo: Path, tmp_path: Path, limit: int, expected: int
) -> None:
    files = {
        "memory/memory.limit_in_bytes": str(limit),
        "memory/memory.usage_in_bytes": str(500 * MIB),
        "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {100 * MIB}\n",
    }
    assert free_host_bytes(meminfo, cgroup(tmp_path / "cg", files)) == expected


def test_without_proc_it_is_the_whole_machine(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path / "none", tmp_path / "none") > 64 * MIB


def test_this_machine_has_some() -> None:
    assert 0 < free_host_bytes() < 1 << 50


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 * MIB, "1.5 GiB"), (3 << 40, "3.0 TiB")],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert human_bytes(count) == text
