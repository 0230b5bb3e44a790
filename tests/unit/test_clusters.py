"""Of several test processes one begins with all that need clusters; the others make room, and one of them has
all that start some."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import BESIDE_CLUSTERS

PROJECT = Path(__file__).parents[2]
NOTES = """
import os, pathlib
def test_a(worker_id): note(worker_id)
def test_b(worker_id): note(worker_id)
def note(worker_id):
    with open(worker_id, "a") as notes:
        notes.write(f"{pathlib.Path(__file__).stem} {os.getpriority(os.PRIO_PROCESS, 0)}\\n")
"""


CLUSTERS = ("test_1", "test_2", "test_3")
PATIENT = ("test_compare", "test_simulation_validate")
OTHERS = ("test_4", "test_5", "test_6")


def test_one_process_begins_with_all_that_need_clusters_and_the_others_are_nicer(tmp_path: Path) -> None:
    for folder, names in (("e2e", CLUSTERS + PATIENT), ("cache", OTHERS)):
        for name in names:
            (path := tmp_path / "tests" / folder / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
            path.write_text(NOTES)
    (tmp_path / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    subprocess.run(
        [*command, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "tests"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        check=True,
        timeout=120,
    )
    here = os.getpriority(os.PRIO_PROCESS, 0)
    nicer = min(here + BESIDE_CLUSTERS, 19)  # the most there is
    in_cluster = [f"{name} {here}" for name in CLUSTERS for _ in "ab"]
    patient = [f"{name} {nicer}" for name in PATIENT for _ in "ab"]
    beside = [f"{name} {nicer}" for name in OTHERS for _ in "ab"]
    ran = {path.name: path.read_text().splitlines() for path in tmp_path.glob("gw*")}
    assert sorted(line for lines in ran.values() for line in lines) == sorted(in_cluster + patient + beside)
    with_clusters, other = sorted(ran.values(), key=lambda lines: in_cluster[0] not in lines)
    assert with_clusters[:6] == in_cluster
    assert not set(other) & set(in_cluster)
    assert any(set(patient) <= set(lines) for lines in ran.values())
