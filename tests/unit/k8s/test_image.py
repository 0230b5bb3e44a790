"""The Dockerfile, read and not built: what it pins, copies and runs as agrees with everything around it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from deploy.environment import write_proxy_wrapper
from k8s.manifests import Manifests
from k8s.places import PLACES, ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
INSTRUCTIONS = [
    line for line in DOCKERFILE.replace("\\\n", " ").splitlines() if line and not line.startswith("#")
]
TARGETS = ("cpu", "gpu")


def packages() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: list[str] = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return found


def stages() -> dict[str, list[str]]:
    """Stage name -> its instructions, those of the stages it is built on first."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in INSTRUCTIONS:
        if line.startswith("FROM "):
            _, base, _, name = line.split()
            current = found[name] = [*found.get(base, [line])]
        else:
            current.append(line)
    return found


def test_everything_is_pinned() -> None:
    bases = [line.split()[1] for line in INSTRUCTIONS if line.startswith("FROM ")]
    assert {base for base in bases if base not in stages()} == {"python:${PYTHON}"}
    assert re.search(r"^ARG PYTHON=3\.11\.\d+-slim-bookworm$", DOCKERFILE, re.MULTILINE)
    installs = [line for line in INSTRUCTIONS if "pip install" in line]
    assert installs
    assert all("-c /opt/warmpath/constraints.txt" in line for line in installs)
    torch = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch is not None
    assert f"torch=={torch[1]}+cpu" in DOCKERFILE


def test_the_wheel_is_made_of_the_packages_and_nothing_else_enters() -> None:
    copied = [line.split()[1] for line in INSTRUCTIONS if line.startswith("COPY ") and "--from" not in line]
    assert set(packages()) <= set(copied)
    assert set(copied) - set(packages()) == {"pyproject.toml", "constraints.txt", "deploy.yaml"}
    ignore = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert ignore[0] == "*"
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    assert allowed == {
        *packages(),
        "pyproject.toml",
        "hatch_build.py",
        "constraints.txt",
        "README.md",
        "LICENSE",
        "deploy.yaml",
    }


@pytest.mark.parametrize("target", TARGETS)
def test_runs_as_the_user_that_pods_have(target: str) -> None:
    users = [line.split()[1] for line in stages()[target] if line.startswith("USER ")]
    for place in PLACES.values():
        for pod in Manifests.parse(place.kept.read_text()).pods():
            if pod.is_ray:
                security = pod.spec["securityContext"]
                assert users[-1] == f"{security['runAsUser']}:{security['runAsGroup']}"
                assert pod.main["image"] in DOCKERFILE  # the very name that the build command gives it
    assert any(line.startswith("HEALTHCHECK ") for line in stages()[target])


def test_triton_finds_a_compiler_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """It builds its launchers when it runs: an image without a compiler came up, and died at once."""
    from triton.runtime import build

    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(RuntimeError, match="Failed to find C compiler"):
        build._build("launcher", "launcher.c", "/nowhere", [], [], [], [])
    (install,) = [line for line in stages()["gpu"] if "apt-get install" in line]
    assert {"gcc", "libc6-dev"} <= {word.partition("=")[0] for word in install.split()}
    assert not [line for line in stages()["cpu"] if "apt-get" in line]


def test_a_login_shell_finds_ray_too(tmp_path: Path) -> None:
    """Debian's /etc/profile sets PATH anew, and then reads /etc/profile.d."""
    (line,) = [each for each in stages()["cpu"] if "/etc/profile.d" in each]
    script = line.removeprefix("RUN ").replace("/etc/profile.d", str(tmp_path))
    subprocess.run(["sh", "-c", script], check=True)
    login = f"PATH=/usr/local/bin:/usr/bin:/bin; . {tmp_path}/warmpath.sh; echo $PATH"
    heard = subprocess.run(["bash", "-c", login], check=True, capture_output=True, text=True).stdout
    assert heard.startswith("/opt/warmpath/bin:")
    assert heard.strip().endswith(":/bin")


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (None, 1)])
def test_healthcheck_says_whether_it_serves(status: int | None, code: int) -> None:
    """The image's own command, asked of a server that is ready, not ready, or not there."""

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/health"
            assert status is not None
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    (line,) = [each for each in stages()["cpu"] if each.startswith("HEALTHCHECK ")]
    command = json.loads(line.partition(" CMD ")[2])
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        port = server.server_address[1]
        if status is None:
            server.socket.close()
        else:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [sys.executable, *(each.replace("8000", str(port)) for each in command[1:])]
        assert command[2].count(str(port)) == 1
        done = subprocess.run(command, capture_output=True)
        if status is not None:
            server.shutdown()
    assert done.returncode == code


@pytest.mark.parametrize("target", TARGETS)
def test_the_proxy_it_makes_runs(target: str, tmp_path: Path) -> None:
    """The image's own RUN line, in a folder of ours: the file that pods name, and it starts HAProxy."""
    (line,) = [each for each in stages()[target] if "warmpath-haproxy" in each]
    places = {
        each["value"]
        for pod in Manifests.parse(PLACES["gpu"].kept.read_text()).pods()
        for each in pod.main["env"]
        if each["name"] == "RAY_SERVE_HAPROXY_BINARY_PATH"
    }
    (place,) = places
    assert place in line
    script = line.removeprefix("RUN ").replace("/opt/warmpath/bin", str(tmp_path))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["sh", "-c", script], check=True, env={**os.environ, "PATH": path})
    made = tmp_path / Path(place).name
    here = write_proxy_wrapper(tmp_path / "here")
    assert made.read_text() == here.read_text()  # one proxy, wherever it runs
    version = subprocess.run([made, "-v"], check=True, capture_output=True, text=True).stdout
    assert "HAProxy" in version
    config = tmp_path / "haproxy.cfg"
    timeouts = "".join(f"    timeout {side} 1s\n" for side in ("client", "connect", "server"))
    config.write_text(f"defaults\n    mode http\n{timeouts}listen x\n    bind unix@{tmp_path}/socket\n")
    for _ in range(2):  # the proxy is started again with each reload
        subprocess.run([made, "-c", "-f", config], check=True, capture_output=True)
    assert config.read_text().count("option http-buffer-request") == 1
