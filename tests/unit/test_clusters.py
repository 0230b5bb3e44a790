"""Of several test processes one runs all that need clusters, and begins with them; the others make room."""

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
        notes.write(f"{pathlib.Path(__file__).parent.name} {os.getpriority(os.PRIO_PROCESS, 0)}\\n")
"""


def test_one_process_begins_with_all_that_need_clusters_and_the_others_are_nicer(tmp_path: Path) -> None:
    for name in ("e2e/test_1", "e2e/test_2", "e2e/test_3", "cache/test_4", "cache/test_5", "cache/test_6"):
        (path := tmp_path / "tests" / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
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
    in_cluster, beside = f"e2e {here}", f"cache {here + BESIDE_CLUSTERS}"
    ran = {path.name: path.read_text().splitlines() for path in tmp_path.glob("gw*")}
    assert sorted(line for lines in ran.values() for line in lines) == [beside] * 6 + [in_cluster] * 6
    with_clusters, other = sorted(ran.values(), key=lambda lines: in_cluster not in lines)
    assert with_clusters[:6] == [in_cluster] * 6
    assert set(other) == {beside}
