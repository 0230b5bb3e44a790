"""A driver: the deployment on two local Ray nodes, with the GCS's state in a Redis of its own if asked.

Who runs Ray for others restarts a GCS that has died; here a thread does, RESTART_AFTER_S later. The test
kills, this only supervises.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from deploy.ports import free_base
from tests.e2e.faults.drivers import serve

RESTART_AFTER_S = 5.0
NODE_CPUS = 2
_START_LIMIT_S = 10.0


def main(argv: list[str]) -> int:
    """`--no-redis` first: the GCS keeps its state in memory, and nobody restarts it."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--no-redis", action="store_true")
    arguments, rest = own.parse_known_args(argv)
    if arguments.no_redis:
        return serve(rest, variables={}, prepare=lambda: _use_two_nodes(supervise=False))
    redis, address = _start_redis()
    try:
        variables = {"RAY_REDIS_ADDRESS": address}
        return serve(rest, variables=variables, prepare=lambda: _use_two_nodes(supervise=True))
    finally:
        redis.kill()
        redis.wait()


def _start_redis() -> tuple[subprocess.Popen[bytes], str]:
    """A server on a free port of 127.0.0.1 that keeps everything in memory, and its address."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise SystemExit("redis-server is not installed")
    port = free_base()
    command = [binary, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, cwd=os.environ["RAY_TMPDIR"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return process, f"127.0.0.1:{port}"
    process.kill()
    raise SystemExit("redis-server does not answer")


def _use_two_nodes(*, supervise: bool) -> None:
    """From now on `ray.init` starts two nodes and joins them; `ray.shutdown` stops them."""
    import ray
    from ray.cluster_utils import Cluster

    init, shutdown = ray.init, ray.shutdown
    cluster = Cluster()

    def start(
        *, address: str, include_dashboard: bool, dashboard_host: str, dashboard_port: int, **options: Any
    ) -> Any:
        cluster.add_node(
            num_cpus=NODE_CPUS,
            include_dashboard=include_dashboard,
            dashboard_host=dashboard_host,
            dashboard_port=dashboard_port,
        )
        cluster.add_node(num_cpus=NODE_CPUS)
        if supervise:
            threading.Thread(target=_supervise, args=(cluster.head_node,), daemon=True).start()
        return init(address=cluster.address, **options)

    def stop() -> None:
        shutdown()
        cluster.shutdown()

    ray.init, ray.shutdown = start, stop


def _supervise(node: Any) -> None:
    """Restart a GCS that has died, on its old port."""
    while True:
        time.sleep(0.2)
        infos = node.all_processes.get("gcs_server")
        if infos and infos[0].process.poll() is not None:
            time.sleep(RESTART_AFTER_S)
            node.kill_gcs_server(check_alive=False)  # only takes note: it is dead
            node.start_gcs_server()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
