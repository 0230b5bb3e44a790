"""`python -m loadtest compare` ended by a signal: the report of what ran, and no server left behind.

The launcher only pretends: it answers as a deployment of one replica does, and starts no Ray.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadtest.comparison.results import read
from tests.fakes.starting import beginning

ROOT = Path(__file__).parents[2]
STARTING = (
    "import runpy, sys; sys.executable = sys.argv.pop(1); runpy.run_module('loadtest', run_name='__main__')"
)
LAUNCHER = """\
#!{python}
import json, os, pathlib, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if "check" in sys.argv:
    sys.exit(0)
folder = pathlib.Path({folder!r})
(folder / "pid").write_text(str(os.getpid()))
CHUNK = {{"choices": [{{"index": 0, "text": "x", "finish_reason": "length"}}]}}
STREAM = f"data: {{json.dumps(CHUNK)}}\\n\\ndata: [DONE]\\n\\n"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(json.dumps({{"replicas": 1, "data": [{{"id": "tiny"}}]}}), "application/json")

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.answer(STREAM, "text/event-stream")
        with (folder / "answers").open("a") as file:
            file.write(".")

    def answer(self, text, kind):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
WARMING = 24  # requests that no run counts


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("sent", "ignored"),
    [
        pytest.param(signal.SIGHUP, None, id="SIGHUP", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, signal.SIGINT, id="SIGTERM to a background job"),
    ],
)
def test_whoever_ends_it_ends_the_server_and_has_the_report(
    sent: signal.Signals, ignored: signal.Signals | None, tmp_path: Path
) -> None:
    launcher = tmp_path / "launcher"
    launcher.write_text(LAUNCHER.format(python=sys.executable, folder=str(tmp_path)))
    launcher.chmod(0o755)
    command = [sys.executable, "-c", STARTING, str(launcher), "compare", "--policy", "round_robin"]
    command += ["--replicas", "1", "--rate", "40", "--seconds", "10"]
    command += ["--no-plots", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        beginning(command, ignored=ignored),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    answers = tmp_path / "answers"
    try:
        deadline = time.monotonic() + 120
        # An eighth of the cell's 400 requests counts for nothing.
        while not answers.exists() or answers.stat().st_size < WARMING + 50 + 20:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(sent)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert "the report has what ran" in told
    results = read(tmp_path / "out" / "results.json")
    assert results.was_stopped
    assert results.runs[0].tally.answers > 0
    assert not is_running(int((tmp_path / "pid").read_text()))
