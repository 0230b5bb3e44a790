"""`python -m deploy`: what is wrong is said before anything starts; what was started is stopped."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy import __main__ as command
from deploy.errors import TRY_AGAIN
from deploy.ports import Ports, free_base
from tests.e2e.deployments import USUAL, deployed
from tests.fakes.starting import beginning
from tests.model_families import FAMILIES, save
from tests.servers import (
    ROOT,
    START_ATTEMPTS,
    Server,
    assert_nothing_left,
    deploy_file,
    processes_below,
    running_server,
    stop,
)

pytestmark = pytest.mark.timeout(300)  # several starts in a test, each of them 40 s on a slow machine


def serve(file: Path, *options: str, temp: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy", "serve", str(file), *options],
        cwd=ROOT,
        env={**os.environ, "RAY_TMPDIR": str(temp), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=240,
    )


Check = Callable[[Path], tuple[int, str]]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Check:
    """`python -m deploy check` in this process, which has imported everything: status, standard error."""
    monkeypatch.setenv("COLUMNS", "300")

    def run(file: Path) -> tuple[int, str]:
        status = command.main(["check", str(file)])
        return status, capsys.readouterr().err

    return run


def model_folder(folder: Path, *names: str) -> str:
    folder.mkdir()
    for name in names:
        (folder / name).write_text('{"model_type": "llama"}' if name.endswith("json") else "x")
    return str(folder)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Ray puts unix sockets below its temporary folder, and their paths have at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="wp", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("replica", "router", "says"),
    [
        ({"modle": "tiny"}, {}, "unknown key 'modle'; did you mean 'model'?"),
        ({"block_size": 0}, {}, "block_size = 0: must be between"),
        ({}, {"policy": "fastest"}, "policy = 'fastest'"),
        ({"model": "/nonexistent/model"}, {}, "this folder does not exist"),
    ],
)
def test_wrong_settings_are_named_before_anything_starts(
    tmp_path: Path, check: Check, replica: dict[str, Any], router: dict[str, Any], says: str
) -> None:
    file = deploy_file(tmp_path, replica=replica, router=router)
    status, told = check(file)
    assert (status, says in told) == (2, True), told


def test_a_server_with_a_wrong_setting_starts_nothing(tmp_path: Path) -> None:
    file = deploy_file(tmp_path, replica={"modle": "tiny"})
    done = serve(file, "--port", str(free_base()), temp=tmp_path)
    assert done.returncode == 2
    assert "unknown key 'modle'; did you mean 'model'?" in done.stderr
    assert "Traceback" not in done.stderr
    assert not processes_below(tmp_path)


def test_pickle_weights_are_refused(tmp_path: Path, check: Check) -> None:
    folder = model_folder(tmp_path / "model", "config.json", "pytorch_model.bin")
    status, told = check(deploy_file(tmp_path, replica={"model": folder}))
    assert status == 2
    assert "pickles (pytorch_model.bin)" in told
    assert "safetensors only" in told


def test_taken_port_is_named(tmp_path: Path) -> None:
    base = free_base()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", base))
        holder.listen()
        done = serve(deploy_file(tmp_path), "--port", str(base), temp=tmp_path)
    assert done.returncode == 2
    assert f"port {base} (HTTP) is in use" in done.stderr
    assert not processes_below(tmp_path)


def test_too_little_memory_says_both_numbers(tmp_path: Path) -> None:
    file = deploy_file(tmp_path, replicas=100_000)
    done = serve(file, "--port", str(free_base()), temp=tmp_path)
    assert done.returncode == 2
    assert "iB of memory on this machine for the weights of 100,000 replicas" in done.stderr
    assert "are free" in done.stderr


def test_check_accepts_the_projects_own_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", str(ROOT / "deploy.yaml")]) == 0
    assert "deploy.yaml: fine (2 replicas of tiny)" in capsys.readouterr().out


@pytest.mark.long  # a cluster of its own
def test_failed_start_ends_with_its_reason(short_folder: Path) -> None:
    """A setting that only a replica can judge: the KV pages cannot be allocated on this machine."""
    file = deploy_file(short_folder, replicas=1, replica={"num_blocks": 1 << 30})
    done = serve(file, "--port", str(free_base()), temp=short_folder)
    assert done.returncode == 2
    assert "NotEnoughMemory" in done.stderr
    assert "are free" in done.stderr
    assert_nothing_left(short_folder)


@pytest.mark.long  # a cluster beside another one
@deployed(USUAL)
def test_two_deployments_side_by_side_and_the_simulated_runner(server: Server) -> None:
    """Neither meets the other's ports, cluster or proxy; both answer; one stops alone. Router and four
    replicas start on two cores, those that compute nothing without torch. Ray's dashboard is there where it
    is asked for."""
    options = ["--ray-dashboard"]
    with running_server(replicas=4, replica={"runner": "simulated"}, options=options) as other:
        assert f"Ray's own {_at(other, 5)}\n" in other.log.read_text()
        assert httpx.get(_at(other, 5), timeout=30).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(_at(server, 5))
        assert len(server.version()["replicas"]) == 2
        assert len(other.version()["replicas"]) == 4
        assert other.version()["replicas"][0]["device"] == "simulated"
        assert _have_torch(server)
        assert not _have_torch(other)
        _assert_only_on_loopback(other)
        # As a supervisor stops it; and somebody who does not wait is no reason to leave something behind.
        other.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert stop(other.process) == 0
        assert len(server.version()["replicas"]) == 2


@pytest.mark.long  # a cluster of its own
def test_a_terminal_that_closes_leaves_nothing_behind(short_folder: Path) -> None:
    """Its signal goes to the whole process group, and Ray's own processes may be gone before the launcher has
    stopped anything: nobody was left to end HAProxy, which listened on; and Serve waited 30 s for a
    controller that was gone."""
    base, pid, terminal = _serving_in_a_terminal(short_folder)
    try:
        for each in processes_below(short_folder):
            number, _, line = each.partition(": ")
            if int(number) != pid and "haproxy -dS" not in line:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)
    finally:
        os.close(terminal)
    began = time.monotonic()
    assert os.waitpid(pid, 0)[1] == 0
    assert time.monotonic() - began < 25
    assert_nothing_left(short_folder)
    Ports(base).check_free("127.0.0.1")


def _serving_in_a_terminal(folder: Path) -> tuple[int, int, int]:
    """The ports' base, the launcher's pid, and the terminal, whose closing it will be told of."""
    file = deploy_file(folder, replicas=1, replica={"runner": "simulated"})
    for left in reversed(range(START_ATTEMPTS)):
        base = free_base()
        arguments = [sys.executable, "-m", "deploy", "serve", str(file), "--port", str(base)]
        pid, terminal = pty.fork()
        if pid == 0:  # the leader of the terminal's session
            os.chdir(ROOT)
            os.execve(sys.executable, beginning(arguments), {**os.environ, "RAY_TMPDIR": str(folder)})
        said, is_serving = _read_until(terminal, "Ctrl-C stops everything")
        if is_serving:
            break
        os.close(terminal)
        is_temporary = left and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == TRY_AGAIN
        assert is_temporary, f"it ended, and had said: {said[-4000:]}"
    return base, pid, terminal


def _read_until(terminal: int, text: str) -> tuple[str, bool]:
    """What it says until that is there, or it is over; whether that is there."""
    said = ""
    while text not in said:
        try:
            said += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # nobody has the other end any more
            return said, False
    return said, True


def _have_torch(server: Server) -> bool:
    """Whether its replicas' processes do: all, or none."""
    pids = [each["pid"] for each in server.version()["replicas"]]
    (have,) = {"libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in pids}
    return have


def _base(server: Server) -> int:
    return int(server.url.rsplit(":", 1)[1])


def _at(server: Server, offset: int) -> str:
    return f"http://127.0.0.1:{_base(server) + offset}"


def _assert_only_on_loopback(server: Server) -> None:
    """127.0.0.2 reaches what listens on every address, and nothing that listens on 127.0.0.1."""
    base = _base(server)
    for offset, use in ((0, "HTTP"), (3, "fallback"), (5, "dashboard"), (10, "Router")):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", base + offset)) == 0, use
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.2", base + offset)) != 0, use


def test_plain_serve_run_of_a_model_folder_without_chat_template(short_folder: Path) -> None:
    """`serve run deploy.yaml` in an activated environment, without the launcher; a model from a folder."""
    model = save(FAMILIES[0], short_folder / "model")
    settings = short_folder / "model" / "tokenizer_config.json"
    without = {
        key: value for key, value in json.loads(settings.read_text()).items() if key != "chat_template"
    }
    settings.write_text(json.dumps(without))
    base = free_base()
    file = deploy_file(short_folder, replicas=1, replica={"model": str(model), "model_name": "mine"})
    content = yaml.safe_load(file.read_text())
    content["http_options"]["port"] = base
    file.write_text(yaml.safe_dump(content))
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("serve")), "run", str(file)],
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": "local", "RAY_TMPDIR": str(short_folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        transport = httpx.HTTPTransport(retries=5)
        with httpx.Client(base_url=f"http://127.0.0.1:{base}", transport=transport, timeout=5) as client:
            assert _eventually_healthy(client)
            body = {"model": "mine", "prompt": "Hello!", "max_tokens": 4}
            answer = client.post("/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 4
            chat = {"model": "mine", "messages": [{"role": "user", "content": "Hello!"}]}
            refused = client.post("/v1/chat/completions", json=chat, timeout=60)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "no_chat_template"
            assert str(short_folder) not in refused.text
    finally:
        stop(process)


def _eventually_healthy(client: httpx.Client, limit_s: float = 240.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if client.get("/health").status_code == 200:
                return True
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    return False
