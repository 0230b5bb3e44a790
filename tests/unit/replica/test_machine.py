"""What a replica computes on has one name for all who share it."""

from __future__ import annotations

import subprocess
import sys

from replica.machine import machine_of


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
