"""The machine line."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from benchmarks import machine

CPUINFO = "processor\t: 0\nmodel name\t: Some  CPU @ 2.00GHz\nprocessor\t: 1\nmodel name\t: Another\n"


def test_the_cpu_is_the_first_one_named() -> None:
    assert machine.cpu_name(CPUINFO) == "Some CPU @ 2.00GHz"
    assert machine.cpu_name("") == platform.machine()


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ("sse2 avx2 avx512f avx512_vnni", "A CPU with AVX-512"),
        ("sse2 avx avx2", "A CPU with AVX2"),
        ("sse2", "A CPU"),
    ],
)
def test_its_widest_vectors_are_named(flags: str, shown: str) -> None:
    assert machine.cpu_name(f"model name\t: A CPU\nflags\t\t: {flags}\n") == shown


def test_outside_a_checkout_the_commit_is_unknown(tmp_path: Path) -> None:
    assert machine.commit(tmp_path) == "unknown"


def test_the_line_names_threads_and_versions() -> None:
    line = machine.describe(2)
    assert "2 torch threads" in line
    assert "transformers " in line
    assert "1 torch thread," in machine.describe(1)
