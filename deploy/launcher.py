"""Runs `serve run deploy.yaml` on a Ray cluster of its own, from the first check to the last process.

Import this only after `environment.py`'s variables are set: importing Ray Serve reads them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import click
import ray
import yaml
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus
from ray.serve.scripts import cli as serve_cli
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cache.errors import ConfigError
from deploy import stop_signals
from deploy.errors import ClusterTimedOut, DeployFailed, ProxyTimedOut
from deploy.ports import Ports
from deploy.preflight import check_cpus, check_gpus, check_keys, check_memory, check_models, check_packages
from deploy.proxy_processes import end_proxies
from deploy.serve_file import ServeFile
from replica.errors import EventSocketError

POLL_S = 0.25
LOOK_S = 1.0  # between looks for the cluster, while Serve is shutting down
WAITS = "to be scheduled"  # in what it says of one for whose replicas nothing has had room for 30 s
TIMED_OUT = "timed out during startup"  # in what Ray says where its node is not up within 30 s
NO_PROXY = "HTTP proxies not available"  # in what Serve says where its proxy is not ready within 60 s
FAILED_TO_START = "failed to start"  # in what Serve says of a deployment whose constructor raised


def launch(
    path: Path,
    ports: Ports,
    run_folder: Path,
    *,
    fast_proxy: bool,
    ray_dashboard: bool = False,
    verbose: bool,
) -> int:
    """Serve until Ctrl-C. Returns the exit status; raises ServingError when it cannot start."""
    console = Console(highlight=False)
    began = time.monotonic()
    file = ServeFile.read(path)
    ports.check_free(file.host)
    check_packages(file)
    check_memory(file)
    check_models(file)
    check_keys(file)
    rendered = run_folder / "deploy.yaml"
    rendered.write_text(yaml.safe_dump(file.with_port(ports.http), sort_keys=False))
    stop_signals.catch(stop_signals.interrupt)
    watch = _Watch(file, ports, console, fast_proxy=fast_proxy, ray_dashboard=ray_dashboard, began=began)
    try:
        with console.status("Starting a Ray cluster on this machine"):
            _start_cluster(ports, ray_dashboard=ray_dashboard, verbose=verbose)
        # Anew: Ray takes SIGTERM for a crash, prints a stack and aborts.
        stop_signals.catch(_interrupt_and_look_after(ray.get_runtime_context().gcs_address))
        there_are = ray.cluster_resources()  # as Ray has counted them
        check_gpus(file, there_are.get("GPU", 0.0))
        check_cpus(file, there_are.get("CPU", 0.0))
        watch.start()
        _serve(rendered)
    except (KeyboardInterrupt, SystemExit, click.Abort):
        console.print("Stopped.")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        watch.stop()
        ray.shutdown()
        end_proxies(run_folder)  # where all processes of Ray's were killed, nobody has
    if watch.failure is not None:
        raise watch.failure
    return 0


def _start_cluster(ports: Ports, *, ray_dashboard: bool, verbose: bool) -> None:
    """Raises ClusterTimedOut; what Ray has started by then ends with this process."""
    try:
        ray.init(
            address="local",
            namespace="serve",
            include_dashboard=ray_dashboard,
            dashboard_host="127.0.0.1",
            dashboard_port=ports.dashboard,
            log_to_driver=verbose,
            logging_level="INFO" if verbose else "ERROR",
        )
    except Exception as error:  # Ray has no type of its own for it
        if TIMED_OUT not in str(error):
            raise
        raise ClusterTimedOut(os.getloadavg()[0], os.cpu_count() or 1) from None


def _serve(rendered: Path) -> None:
    """Until it is interrupted. Raises ProxyTimedOut."""
    try:
        # "auto": the cluster just started. Without it the command would mention RAY_ADDRESS=local.
        serve_cli.main(["run", "--address", "auto", str(rendered)], standalone_mode=False)
    except TimeoutError as error:
        if NO_PROXY not in str(error):
            raise
        raise ProxyTimedOut(os.getloadavg()[0], os.cpu_count() or 1) from None


def _interrupt_and_look_after(gcs_address: str) -> Callable[[int, FrameType | None], None]:
    """A handler that interrupts; and again, as soon as the cluster is gone: a signal to the whole process
    group (a closed terminal, GNU `timeout`) ends that, too, and Serve would wait 30 s for its controller.
    """
    host, _, port = gcs_address.rpartition(":")

    def look(signum: int, frame: FrameType | None) -> None:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) != 0:
                signal.setitimer(signal.ITIMER_REAL, 0)
                raise KeyboardInterrupt

    def interrupt(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
        stop_signals.interrupt(signum, frame)

    return interrupt


class _Watch:
    """Shows progress until the service is ready, then says how to use it; ends a start that failed."""

    def __init__(
        self,
        file: ServeFile,
        ports: Ports,
        console: Console,
        *,
        fast_proxy: bool,
        ray_dashboard: bool,
        began: float,
    ) -> None:
        self.failure: DeployFailed | None = None
        self._file = file
        host = "127.0.0.1" if file.host == "0.0.0.0" else file.host
        self._url = f"http://{host}:{ports.http}{file.route_prefix.removesuffix('/')}"
        self._console = console
        self._fast_proxy = fast_proxy
        self._ray_dashboard = f"http://127.0.0.1:{ports.dashboard}" if ray_dashboard else None
        self._began = began
        self._told: set[str] = set()  # deployments of which it was said that they wait
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            is_ready = self._until_ready()
        except DeployFailed as failure:
            self.failure = failure
            # As Ctrl-C does: `_thread.interrupt_main` would not wake the command from a sleep of ten seconds.
            main_thread = threading.main_thread().ident
            assert main_thread is not None, "it has started"
            signal.pthread_kill(main_thread, signal.SIGINT)
            return
        if is_ready:
            self._say_ready()

    def _until_ready(self) -> bool:
        """False when stopped before. Raises DeployFailed."""
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("Starting Ray Serve")
            while not self._stopped.wait(POLL_S):
                progress.update(task, description=self._describe())
                # /health speaks of the replicas known so far; the operator asked for all of them.
                health = _get_json(f"{self._url}/health")
                if health is not None and health["replicas"] >= self._file.num_replicas:
                    return True
        return False

    def _describe(self) -> str:
        """Where the start is. Raises DeployFailed when Serve has given up, or will."""
        try:
            application = serve.status().applications.get(self._file.app_name)
        except (RayError, RayServeException):  # its controller is ended, or started anew: asked again
            application = None
        if application is None:
            return "Starting Ray Serve"
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            raise DeployFailed(_root_cause(application))
        if (setting := _wrong_setting(application)) is not None:
            raise DeployFailed(setting)
        self._say_what_waits(application)
        running = {
            name: deployment.replica_states.get("RUNNING", 0)
            for name, deployment in application.deployments.items()
        }
        if running.get("Replica", 0) < self._file.num_replicas or not running.get("Router"):
            counts = ", ".join(f"{name} {count}" for name, count in sorted(running.items()))
            return f"Loading the model (running: {counts or 'nothing yet'})"
        return "Waiting for every replica's cache snapshot"

    def _say_what_waits(self, application: Any) -> None:
        """Once of each deployment, in Serve's words: it may be for ever."""
        for name, deployment in application.deployments.items():
            if WAITS in deployment.message and name not in self._told:
                self._told.add(name)
                self._console.print(deployment.message, soft_wrap=True, markup=False)

    def _say_ready(self) -> None:
        # What the service says of itself; nothing where it wants a key, which we do not have.
        version = _get_json(f"{self._url}/version")
        has_keys = self._file.app.tenants.has_keys
        name = self._file.app.model_name
        lines = [
            f"\nReady after {time.monotonic() - self._began:.0f} s: {self._url}/v1",
            f"  model     {name}",
        ]
        if self._file.app.replica.model == "tiny":
            lines.append("            random weights, so it speaks nonsense; for a real one, in deploy.yaml:")
            lines.append("            model: <local dir or hub id>")
        if version is not None:
            lines += [f"  replica   {_replica_line(replica)}" for replica in version["replicas"]]
            lines.append(f"  routing   {version['policy']}, {_hashing(version)}")
        if has_keys:
            lines.append(f"  API keys  needed; cache scope: {self._file.app.tenants.scope.value}")
        lines.append(f"  proxy     {'HAProxy' if self._fast_proxy else 'Serve, Python'}")
        if self._file.app.router.get("dashboard"):
            lines.append(f"  dashboard {self._url}/dashboard")
        if self._ray_dashboard is not None:
            lines.append(f"  Ray's own {self._ray_dashboard}")
        chat = version is not None and version["has_chat_template"]
        lines.append(f"\nTry it:\n\n{_curl(self._url, name, chat=chat, key=has_keys)}")
        lines.append("\nCtrl-C stops everything.")
        # One write, and no wrapping: the command must survive a narrow terminal's copy and paste.
        self._console.print("\n".join(lines), soft_wrap=True, markup=False)


def _replica_line(replica: dict[str, Any]) -> str:
    ranks = f"{replica['num_ranks']} ranks, " if replica["num_ranks"] > 1 else ""
    return (
        f"{replica['replica_id']}  {replica['device']}, {ranks}{replica['kv_dtype']}, "
        f"{replica['attention_backend']} attention, "
        f"{replica['num_blocks']} blocks of {replica['block_size']} tokens"
    )


def _hashing(version: dict[str, Any]) -> str:
    by = f"blocks by {version['hash_algorithm']}"
    slow = [
        word for word, of in (("hashed", "hashes"), ("decided", "decisions")) if not version[f"compiled_{of}"]
    ]
    why = "in Python, slower: no C compiler, or no headers of Python's, at the installation"
    return f"{by}, {' and '.join(slow)} {why}" if slow else by


def _curl(url: str, model: str, *, chat: bool, key: bool) -> str:
    body: dict[str, Any] = {"model": model, "max_tokens": 32, "stream": True}
    if chat:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "Hello!"}]
    else:
        path, body["prompt"] = "completions", "Hello!"
    headers = "-H 'content-type: application/json'"
    if key:
        headers += ' -H "authorization: Bearer $OPENAI_API_KEY"'
    return f"curl -N {url}/v1/{path} {headers} \\\n  -d '{json.dumps(body)}'"


def _root_cause(application: Any) -> str:
    """The innermost error of the first failing deployment's message: Serve prints whole tracebacks."""
    messages = [deployment.message for deployment in application.deployments.values() if deployment.message]
    return _innermost((messages or [application.message])[0].strip())


def _wrong_setting(application: Any) -> str | None:
    """What the first one to start said of its settings, if that is why it failed. Serve starts it again, and
    again, to hear the same: without end, where another replica started and has the port that both want."""
    settings = _names(ConfigError) | _names(EventSocketError)
    for deployment in application.deployments.values():
        if FAILED_TO_START in deployment.message:
            cause = _innermost(deployment.message)
            if cause.partition(":")[0] in settings:
                return cause
    return None


def _names(error: type[Exception]) -> set[str]:
    """Its own, and those of all that are one."""
    return {error.__name__}.union(*[_names(each) for each in error.__subclasses__()])


def _innermost(text: str) -> str:
    """The error that a traceback ends with, unindented, as "cache.errors.ConfigError: num_blocks = ..."; all
    of a text that has none."""
    causes: list[str] = re.findall(r"^(?:\w+\.)*([A-Z]\w*: (?!Traceback).+)$", text, flags=re.MULTILINE)
    return causes[-1] if causes else text


def _get_json(url: str) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            value: dict[str, Any] = json.loads(answer.read())
            return value
    except (urllib.error.URLError, OSError, ValueError):
        return None
