"""`python -m loadtest replay` on real engines over HTTP: hits as the trace has them, failures told."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loadtest.comparison.results import Results, read
from loadtest.open_loop.ceiling import infinite_cache_hit_ratio
from loadtest.workloads.traces import read_trace
from tests.http_server import HttpServer, engine_server

ROOT = Path(__file__).parents[2]
BLOCK = 64


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with engine_server(num_replicas=2, num_blocks=512, expose_routing=True, max_wait_s=None) as running:
        yield running


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A recording: two sessions of three turns, two seconds in all."""
    lines = [json.dumps({"format": "warmpath-trace", "version": 1})]
    for turn in range(3):
        for session in ("aa", "bb"):
            blocks = [f"{session}{number:02x}" for number in range(turn + 2)]
            tokens = BLOCK * len(blocks) + 5
            lines.append(
                json.dumps(
                    {
                        "t": 0.6 * turn + (0.2 if session == "bb" else 0.0),
                        "input": tokens,
                        "output": 3,
                        "blocks": blocks,
                        "block_size": BLOCK,
                        "session": session,
                    }
                )
            )
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def replay(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtest", "replay", *arguments, "--out", str(folder / "out")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)


def results(folder: Path) -> Results:
    return read(folder / "out" / "results.json")


@pytest.mark.parametrize("kind", ["tokens", "text"])
def test_a_trace_is_replayed_with_its_own_hits(
    kind: str, server: HttpServer, trace: Path, tmp_path: Path
) -> None:
    more = ("--text", "--seed", "1", "--no-plots") if kind == "text" else ()
    ended = replay("--url", server.url, "--trace", str(trace), *more, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (run,) = results(tmp_path).runs
    tally = run.tally
    assert (tally.due, tally.answers, tally.failures) == (6, 6, {})
    assert tally.finish_reasons == {"length": 6}
    assert tally.late.count == 6
    workload = read_trace(trace)
    assert run.ceiling == pytest.approx(infinite_cache_hit_ratio(workload.requests, BLOCK))
    assert tally.hit_ratio is not None
    if kind == "tokens":
        assert tally.prompt_tokens == sum(request.input_tokens for request in workload.requests)
        assert tally.output_tokens == 18
        page = (tmp_path / "out" / "report.html").read_text()
        assert page.rstrip().endswith("</html>")
    # The engines' blocks of 16 can hold a little more than the trace's of 64, and nothing less.
    assert run.ceiling - 0.05 <= tally.hit_ratio <= run.ceiling + 0.15


def test_several_answers_are_asked_for_in_one_request(server: HttpServer, tmp_path: Path) -> None:
    row = {"t": 0.0, "input": 70, "n": 3, "outputs": [2, 5, 1], "blocks": ["abc0"], "block_size": BLOCK}
    header = {"format": "warmpath-trace", "version": 2}
    path = tmp_path / "several.jsonl"
    path.write_text(f"{json.dumps(header)}\n{json.dumps(row)}\n")
    ended = replay("--url", server.url, "--trace", str(path), "--no-plots", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (run,) = results(tmp_path).runs
    assert (run.tally.answers, run.tally.prompt_tokens, run.tally.output_tokens) == (1, 70, 15)


def test_the_same_prompts_again_are_told_to_be_known(server: HttpServer, trace: Path, tmp_path: Path) -> None:
    """The seed is 0 unless told, and a server that runs on has everything of the first replay."""
    arguments = ("--url", server.url, "--trace", str(trace), "--seed", "11", "--speedup", "2", "--no-plots")
    first, again = (replay(*arguments, folder=tmp_path) for _ in range(2))
    assert (first.returncode, again.returncode) == (0, 0), again.stderr
    assert "cached before they were sent" not in first.stdout
    assert "cached before they were sent" in again.stdout
    assert "another --seed" in again.stdout


def test_a_server_that_refuses_every_request_is_told_and_nothing_is_written(
    server: HttpServer, trace: Path, tmp_path: Path
) -> None:
    arguments = ("--url", server.url, "--trace", str(trace), "--model", "another", "--no-plots")
    ended = replay(*arguments, folder=tmp_path)
    assert ended.returncode == 1
    assert "none of 6 requests got a whole answer" in ended.stderr
    assert "another" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "out").exists()


def test_ctrl_c_reports_what_was_answered(server: HttpServer, trace: Path, tmp_path: Path) -> None:
    """Slowed down so far that the second turn comes in a minute."""
    command = [sys.executable, "-m", "loadtest", "replay", "--url", server.url, "--trace", str(trace)]
    command += ["--speedup", "0.01", "--no-plots", "--seed", "7", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        served = server_metric(server)
        deadline = time.monotonic() + 100
        while server_metric(server) == served:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(0.5)  # the answer's way back
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, told
    assert "the report has what ran" in told
    found = results(tmp_path)
    assert found.was_stopped
    assert 1 <= found.runs[0].tally.answers < 6


def server_metric(server: HttpServer) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    lines = [line for line in text.splitlines() if line.startswith("warmpath_requests_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
