"""What every test runs under: one torch thread, no hub, interpreted kernels, examples that may take long."""

from __future__ import annotations

import functools
import gc
import logging
import math
import os
import signal
import ssl
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.clusters import needs_cluster

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_worker_niceness", "0")
# Triton's kernels run in its interpreter, on the CPU. It asks when it is imported, for the whole process, and
# families of transformers import it: so before any test's module. `python -m tests.gpu` has them compiled.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Each client of httpx reads all the certificates that there are, for a tenth of a second; no test speaks TLS.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# A shell's background job starts with SIGINT ignored, and so would every server the tests start and stop.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Nicer by that than the process with the clusters, whose tests wait for things to be done in time.
BESIDE_CLUSTERS = 5

# How long an example takes says how busy the machine is, and nothing about the law it checks.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples in every run, and a quarter as many: a change is judged by what it changes.
# `make explore` looks for new ones.
settings.register_profile("repeat", settings.get_profile("explore"), derandomize=True, max_examples=25)
settings.load_profile("explore" if os.environ.get("WARMPATH_EXPLORE") else "repeat")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting makes 800,000 objects, which stay as long as the process, and the garbage collector walked
    them over and over: 12 of the 31 seconds that it took. Afterwards it has enough with what tests make."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of the long suites, only files that have long tests: there are few, and to import all takes a while."""
    words = str(config.option.markexpr).split()
    if words[:1] != ["long"] or "or" in words or not collection_path.match("test_*.py"):
        return None
    return "mark.long" not in collection_path.read_text() or None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Of several processes, one has all clusters, and the others a file at a time."""
    from tests.scheduler import OneForClusters  # where there are several, pytest-xdist is installed

    return OneForClusters(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of several processes, what takes longest begins first, as what begins last ends alone: clusters, then
    files that are given most time."""
    if not hasattr(config, "workerinput"):
        return
    limits: dict[Path, float] = defaultdict(float)
    for item in items:
        if limit := item.get_closest_marker("timeout"):
            limits[item.path] = max(limits[item.path], limit.args[0])
    items.sort(key=lambda item: -math.inf if needs_cluster(item.nodeid) else -limits[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Whatever runs beside a cluster leaves it the processors that it asks for."""
    if hasattr(item.config, "workerinput") and not needs_cluster(item.nodeid):
        make_room()


@functools.cache
def make_room() -> None:
    """Once in a process."""
    os.nice(BESIDE_CLUSTERS)


@pytest.fixture(autouse=True, scope="module")
def services_may_go() -> Iterator[None]:
    """FastAPI remembers what kind of function each endpoint is, and with it the service that it belongs to:
    hundreds of them, each with its index and its bodies, were 6 GB in a process. Where there were none, which
    is nearly everywhere, the garbage collector is left to itself: a walk behind every file took more time
    than half of the unit tests together."""
    yield
    if any([emptied(cache) for cache in caches_of_fastapi()]):
        gc.collect()


def caches_of_fastapi() -> list[functools._lru_cache_wrapper[object]]:
    if (kinds := sys.modules.get("fastapi.dependencies.models")) is None:
        return []
    return [each for each in vars(kinds).values() if isinstance(each, functools._lru_cache_wrapper)]


def emptied(cache: functools._lru_cache_wrapper[object]) -> bool:
    """Whether anything was in it."""
    size = cache.cache_info().currsize
    cache.cache_clear()
    return size > 0


@pytest.fixture(autouse=True)
def loggers_are_left_as_they_were() -> Iterator[None]:
    """They are the whole process's: a handler that one test leaves behind is told of in another one's log."""
    before = _shown_by_loggers()
    yield
    assert _shown_by_loggers() == before


def _shown_by_loggers() -> list[tuple[str, bool, int, list[logging.Handler]]]:
    loggers = [logging.getLogger(name) for name in ("cache", "replica", "router", "deploy")]
    return [(logger.name, logger.propagate, logger.level, [*logger.handlers]) for logger in loggers]
