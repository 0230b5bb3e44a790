"""A load that takes more connections than this process may have is refused before it; else there is room."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from loadtest.open_loop.open_files import AT_ONCE_S, most_at_once
from loadtest.open_loop.schedule import Arrival
from loadtest.workloads.request import WorkRequest

ROOT = Path(__file__).parents[4]
LINE = '{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'


@given(st.lists(st.integers(0, 64), max_size=60).map(sorted))
def test_at_once_are_those_of_any_second(eighths: list[int]) -> None:
    due_s = [each / 8 for each in eighths]
    arrivals = [Arrival(each, WorkRequest(each, 8, 1, (0,), 0)) for each in due_s]
    most = max((sum(one <= other < one + AT_ONCE_S for other in due_s) for one in due_s), default=0)
    assert most_at_once(arrivals) == most


def replayed(trace: Path, soft: int, hard: int, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtest", "replay", "--url", "http://127.0.0.1:1", "--no-plots"]
    limited = f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$@"'
    return subprocess.run(
        ["sh", "-c", limited, "sh", *command, "--trace", str(trace), "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_more_at_once_than_files_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    """Those without a file counted as refused by the server, after all of the load."""
    trace = tmp_path / "mine.jsonl"
    trace.write_text(LINE % 0 * 300)
    ended = replayed(trace, 256, 256, tmp_path / "report")
    assert ended.returncode == 2, ended.stderr
    assert "300 requests are due within 1 s" in ended.stderr
    assert "364 open files, and this process may have 256. Raise the limit (`ulimit -n 364`)" in ended.stderr
    raised = replayed(trace, 256, 1024, tmp_path / "report")
    assert (raised.returncode, "no OpenAI-compatible server answers" in raised.stderr) == (1, True)


SCRIPT = """
import resource
from loadtest.open_loop.open_files import make_room
from loadtest.open_loop.schedule import Arrival
for soft, hard, number in ((100, 400, 200), (100, 400, 1000), (300, 400, 10)):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    make_room([Arrival(0.0, None)] * number)
    print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_limit_is_raised_as_far_as_needed_and_allowed() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.stdout == "(264, 400)\n(400, 400)\n(300, 400)\n", ended.stderr
