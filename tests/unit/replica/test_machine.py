"""What a replica computes on has one name for all who share it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import replica.machine
from replica.machine import engines_at_once, machine_of


def test_two_processes_of_a_host_share_its_cores() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "from replica.machine import machine_of; print(machine_of('cpu'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == machine_of("cpu") != ""


def test_who_computes_nothing_shares_nothing() -> None:
    assert machine_of("simulated") == ""


@pytest.fixture
def limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores, and the file that says what a container may use of them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    path = tmp_path / "cpu.max"
    monkeypatch.setattr(replica.machine, "CPU_LIMIT", path)
    return path


@pytest.mark.parametrize(("num_threads", "expected"), [(1, 4.0), (2, 2.0), (3, 4 / 3), (8, 1.0), (None, 1.0)])
def test_cores_have_room_for_so_many_engines(limit: Path, num_threads: int | None, expected: float) -> None:
    assert engines_at_once("cpu", num_threads) == expected
    limit.write_text("max 100000\n")
    assert engines_at_once("cpu", num_threads) == expected


def test_a_container_has_the_cores_that_it_is_limited_to(limit: Path) -> None:
    limit.write_text("150000 100000\n")
    assert engines_at_once("cpu", 1) == 1.5
    limit.write_text("1600000 100000\n")
    assert engines_at_once("cpu", 1) == 4.0


def test_a_card_computes_one_engine_at_a_time(limit: Path) -> None:
    assert engines_at_once("cuda:0", 1) == 1.0
