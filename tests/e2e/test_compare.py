"""`python -m loadtest compare`, command line to report: real deployments on a local Ray, in turn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.comparison.contender import RAY_ROUTER
from loadtest.comparison.results import read

ROOT = Path(__file__).parents[2]
POLICIES = ("expected_time", "round_robin", RAY_ROUTER)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_policies_beside_each_other_on_simulated_replicas(tmp_path: Path) -> None:
    """Round robin cannot have prefix-aware routing's hits, Ray's own router can."""
    command = [sys.executable, "-m", "loadtest", "compare", "--policy", ",".join(POLICIES), "--simulated"]
    # 120 requests each. Chats in a hurry leave these replicas as idle as others would.
    command += ["--replicas", "2", "--rate", "12", "--seconds", "10", "--repeats", "1", "--ttft", "5"]
    command += [
        "--workload",
        "multi_turn:think_s=1,turns=6,first_tokens=300,message_tokens=240,prompt_tokens=200,answer_tokens=8",
    ]
    ended = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    results = read(tmp_path / "out" / "results.json")
    assert results.contenders == POLICIES
    hits = {}
    for run in results.runs:
        assert run.is_whole
        assert run.tally.failures == {}
        assert run.tally.untold == 0
        # Others may leave a replica without requests while nobody waits; round robin cannot.
        assert len(run.tally.replicas) == 2 or run.contender != "round_robin"
        assert run.tally.late.count == run.tally.due == run.tally.answers
        assert run.tally.hit_ratio is not None
        hits[run.contender] = run.tally.hit_ratio
    assert hits["expected_time"] > hits["round_robin"] + 0.1
    assert hits[RAY_ROUTER] > hits["round_robin"] + 0.1
    assert (tmp_path / "out" / "report.html").read_text().rstrip().endswith("</html>")
    for policy in POLICIES:
        assert policy in (tmp_path / "out" / "report.md").read_text()
