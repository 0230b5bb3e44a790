"""Pods of an overlay as processes of this machine: KubeRay's commands, under the containers' environment.

What differs is what two pods on one machine must have otherwise, and is listed in `_own_variables` and
`_own_options`: addresses, ports and folders. Nothing is inherited but PATH, so that what a container lacks is
missing here too. As there, the root file system is read-only but for the cluster's folder, there are no
capabilities, and no process gains any (where the kernel lets us: `can_confine`).

Each node has a loopback address of its own, since a worker does not join a head on 127.0.0.1: Ray takes that
for the machine's outer address. Ray's ports listen on every address then, as they do in pods, and the token
is what closes them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from deploy.environment import serve_environment, write_proxy_wrapper
from deploy.ports import Ports, free_base
from k8s.manifests import RAY_SERVICE, Manifests, Pod
from k8s.places import PLACES, ROOT
from tests.servers import processes_below

LOCAL = "127.0.0.1"  # where proxies listen
STOP_LIMIT_S = 60.0
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"  # of a node that is told to end: Ray's own wait
RAY = str(Path(sys.executable).parent / "ray")
SERVE = str(Path(sys.executable).parent / "serve")
# What KubeRay adds to the containers of a RayService, beside names and addresses. Not its 5 s for requests to
# the GCS: two cores with other tests on them may take longer, and pods have cores of their own.
OPERATORS_VARIABLES = {
    "RAY_timeout_ms_task_wait_for_death_info": "0",
    "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
    "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1",
}
# `exec` to the last: a signal reaches Ray.
_CONFINED = """
mount --make-rprivate / &&
mount --bind "$0" "$0" &&
mount -o remount,bind,ro / &&
exec setpriv --no-new-privs --inh-caps=-all --bounding-set=-all "$@"
"""
# Of `serve_environment`: what two proxies and Routers on one machine must not share.
_PER_NODE = ("_PORT", "_FILE_LOC", "_SOCKET_PATH", "_STATE_BASE", "_STATE_FILE")


@dataclass(frozen=True)
class Overlay:
    """One that was rendered: its Ray pods and the Serve config inside."""

    head: Pod
    workers: tuple[Pod, ...]
    config: Mapping[str, object]

    @classmethod
    def read(cls, name: str) -> Overlay:
        manifests = Manifests.parse(PLACES[name].kept.read_text())
        (service,) = manifests.of_kind(RAY_SERVICE)
        pods = [pod for pod in manifests.pods() if pod.is_ray]
        (head,) = [pod for pod in pods if pod.is_head]
        return cls(
            head,
            tuple(pod for pod in pods if not pod.is_head),
            yaml.safe_load(service["spec"]["serveConfigV2"]),
        )


@dataclass(frozen=True)
class Node:
    """One `ray start` that runs, in the place of a pod."""

    process: subprocess.Popen[bytes]
    log: Path
    address: str
    serving_port: int  # of its proxy
    agent_port: int  # where the liveness probe asks
    dashboard_port: int | None  # the head's
    drains: bool

    def url(self, port: int | None) -> str:
        assert port is not None
        return f"http://{self.address}:{port}"


class Cluster:
    """Nodes of one Ray cluster below a folder. `stop` ends them by their process ids."""

    def __init__(self, folder: Path, token: str) -> None:
        """folder: short, ours alone. token: what the operator would have drawn."""
        self._folder = folder
        self._token = token
        self._bases = _free_bases()
        self._wrapper = write_proxy_wrapper(folder / "warmpath-haproxy")
        self.nodes: list[Node] = []
        self._gcs = ""

    def start(self, pods: Sequence[Pod], *, drains: bool = False) -> Node:
        """One node that offers what these pods offer together. Returns as soon as it is started.

        drains: told to end it finishes first what it serves, as in a cluster; else it is gone at once.
        """
        is_head = pods[0].is_head
        number = len(self.nodes)
        folder = self._folder / str(number)
        folder.mkdir()
        address, ports = f"127.0.0.{2 + number}", Ports(next(self._bases))
        if is_head:
            self._gcs = f"{address}:{ports.base + 6}"
        log = folder / "ray.log"
        options = [*ray_options(pods), *self._own_options(address, ports, is_head=is_head), "--block"]
        with log.open("wb") as out:
            process = subprocess.Popen(
                confined(self._folder, ray_start(options)),
                env=self.environment(pods[0], ports, folder) | ({} if drains else {DRAIN: "0"}),
                cwd=folder,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        dashboard_port = ports.dashboard if is_head else None
        node = Node(process, log, address, ports.http, ports.base + 7, dashboard_port, drains)
        self.nodes.append(node)
        return node

    def environment(self, pod: Pod, ports: Ports, folder: Path) -> dict[str, str]:
        """The container's, with what has to be otherwise here."""
        return {
            "PATH": os.environ["PATH"],
            **OPERATORS_VARIABLES,
            **variables(pod),
            **self._own_variables(ports, folder),
        }

    def check(self) -> None:
        """Raises AssertionError when a node has ended by itself."""
        for node in self.nodes:
            assert node.process.poll() is None, f"`ray start` ended: {node.log}"

    def stop(self) -> None:
        """Workers first; whoever does not end in time is killed.

        Who drains is killed at once: with nobody left to go to, it would wait for all of that time.
        What a node leaves behind goes too, as all that is in a container goes with its first process.
        """
        for node in reversed(self.nodes):
            if node.drains:
                node.process.kill()
            else:
                node.process.terminate()
            try:
                node.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.process.wait()
        self.nodes.clear()
        for line in processes_below(self._folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.partition(":")[0]), signal.SIGKILL)

    def _own_variables(self, ports: Ports, folder: Path) -> dict[str, str]:
        ours = serve_environment(ports, folder, fast_proxy=True)
        return {
            **{key: value for key, value in ours.items() if key.endswith(_PER_NODE)},
            "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(ports.http),  # a head's is the config's own
            "RAY_AUTH_TOKEN": self._token,  # the operator puts it there from its Secret
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(self._wrapper),  # in the image: /opt/warmpath/bin
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # no Service has to drop it first
            "RAY_TMPDIR": str(self._folder),
            "HOME": str(self._folder),  # as /tmp there: the one folder that can be written
            "TMPDIR": str(self._folder),
            "PYTHONPATH": str(ROOT),  # the image has the project installed
            "OMP_NUM_THREADS": "1",
        }

    def _own_options(self, address: str, ports: Ports, *, is_head: bool) -> list[str]:
        """Ports: 52365 and 8080 in every pod, and 6379 and 8265 in the head's."""
        options = {
            "node-ip-address": address,
            "dashboard-agent-listen-port": ports.base + 7,
            "metrics-export-port": ports.base + 8,
            "min-worker-port": 0,
            "max-worker-port": 0,
        }
        if is_head:
            options |= {
                "port": ports.base + 6,
                "dashboard-host": address,
                "dashboard-port": ports.dashboard,
                "ray-client-server-port": ports.base + 9,
            }
        else:
            options |= {"address": self._gcs}
        return (["--head"] if is_head else []) + [f"--{key}={value}" for key, value in options.items()]


def ray_start(options: Sequence[str]) -> list[str]:
    """The container's command as KubeRay writes it: a shell, which the signal of the end must get through."""
    command = f"ulimit -n ${{RAY_START_ULIMIT_OPEN_FILES:-65536}}; {shlex.join([RAY, 'start', *options])}"
    return ["/bin/bash", "-c", "--", command]


def confined(folder: Path, command: Sequence[str]) -> list[str]:
    """The command on a read-only root where only `folder` can be written, without capabilities."""
    return [*_unshare(), "sh", "-c", _CONFINED, str(folder), *command] if can_confine() else list(command)


@functools.cache
def can_confine() -> bool:
    """Whether this user may have mounts of its own: root, or anybody where user namespaces are allowed."""
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        command = [*_unshare(), "sh", "-c", _CONFINED, folder, "true"]
        return subprocess.run(command, capture_output=True).returncode == 0


def _unshare() -> list[str]:
    return ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]


def ray_options(pods: Sequence[Pod]) -> list[str]:
    """`rayStartParams` as KubeRay writes them into the command; of several pods, added up."""
    sizes = {
        key: sum(int(pod.ray_params.get(key, 0)) for pod in pods)
        for key in ("num-cpus", "num-gpus", "object-store-memory")
    }
    custom: dict[str, float] = {}
    for pod in pods:
        custom |= {key: value for key, value in pod.slots.items() if key not in ("CPU", "GPU")}
    unknown = {key for pod in pods for key in pod.ray_params} - sizes.keys() - {"resources"}
    assert not unknown, f"not translated: {unknown}"
    options = [f"--{key}={value}" for key, value in sizes.items() if key in pods[0].ray_params]
    return options + ([f"--resources={json.dumps(custom)}"] if custom else [])


def variables(pod: Pod) -> dict[str, str]:
    """The container's environment; values that come from elsewhere are for whoever starts it."""
    return {each["name"]: each["value"] for each in pod.main["env"] if "value" in each}


@contextlib.contextmanager
def stopped(cluster: Cluster) -> Iterator[Cluster]:
    """Whatever happens inside, its nodes end; what they printed is shown when it fails."""
    try:
        yield cluster
    except BaseException:
        for node in cluster.nodes:
            print(f"--- {node.log}\n{node.log.read_text()[-3000:]}")  # pytest shows it
        raise
    finally:
        cluster.stop()


def _free_bases() -> Iterator[int]:
    """Base ports of spans that are free, each given once."""
    given: set[int] = set()
    while True:
        if (base := free_base()) not in given:
            given.add(base)
            yield base
