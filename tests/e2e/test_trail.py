"""One request in real processes: JSON lines with its id from ingress to engine, and one trace of both."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.deployments import BY_PYTHON, deployed
from tests.servers import Server

CANARY = "xylophone-quartz-7731"
REQUEST_ID = "trail-4711"
TRACE = "0af7651916cd43dd8448eb211c80319c"
SPANS = {"ingress", "tokenize", "decide", "queue", "prefill", "decode"}
NAME_AND_TRACE = r'"name": "(\w+)",\s+"context": \{\s+"trace_id": "0x(\w+)"'
LIMIT_S = 30.0

pytestmark = deployed(BY_PYTHON)


@pytest.fixture(scope="module")
def lines(server: Server) -> dict[str, list[dict[str, Any]]]:
    """Log lines of our own code about one request, by the deployment that wrote them."""
    headers = {"x-request-id": REQUEST_ID, "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    body = {"model": "tiny", "prompt": CANARY * 20, "max_tokens": 8, "temperature": 0}
    httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()
    found: dict[str, list[dict[str, Any]]] = {"Router": [], "Replica": []}
    for name, written in found.items():
        for path in logs(server).glob(f"replica_warmpath_{name}_*.log"):
            for line in path.read_text().splitlines():
                fields = json.loads(line)  # every line is one object, whoever wrote it
                if str(fields.get("request_id", "")).startswith(REQUEST_ID):
                    written.append(fields)
    return found


def logs(server: Server) -> Path:
    (folder,) = server.temp.glob("**/session_2*/logs/serve")
    return folder


def test_its_id_is_in_every_line_from_ingress_to_engine(lines: dict[str, list[dict[str, Any]]]) -> None:
    assert [line["message"] for line in lines["Router"]] == ["request placed", "request ended"]
    assert [line["message"] for line in lines["Replica"]] == ["generation ended"]
    (ended,) = lines["Replica"]
    assert (ended["outcome"], ended["output_tokens"]) == ("length", 8)
    assert {"queue_s", "prefill_s", "decode_s", "cached_tokens", "replica"} <= ended.keys()


def test_both_processes_tell_of_one_trace(server: Server, lines: dict[str, list[dict[str, Any]]]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while (spans := traced(server)) != SPANS:
        assert time.monotonic() < deadline, spans
        time.sleep(0.1)


def traced(server: Server) -> set[str]:
    """Names of the spans of our trace in whatever file the console exporter's lines have gone to."""
    text = "\n".join(path.read_text() for path in logs(server).parent.glob("**/*") if is_output(path))
    messages = re.findall(r'"message": "((?:[^"\\]|\\.)*)"', text)  # Serve makes a JSON line of each line
    text = "\n".join(json.loads(f'"{message}"') for message in messages) + text
    return {name for name, trace in re.findall(NAME_AND_TRACE, text) if trace == TRACE}


def is_output(path: Path) -> bool:
    return path.name.startswith(("worker-", "replica_warmpath_")) and path.suffix in (".out", ".log")


def test_no_prompt_is_in_any_log(server: Server, lines: dict[str, list[dict[str, Any]]]) -> None:
    for path in logs(server).glob("*.log"):
        assert CANARY not in path.read_text()
