"""Real replicas that die or hang end what they were measured for with an error that names them."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
from types import SimpleNamespace
from typing import Any

import pytest

from cache.types import ReplicaId
from loadtest.simulation import real_fleet
from loadtest.simulation.errors import FleetFailed
from loadtest.workloads.request import Workload
from tests.fakes.simulation import request


async def test_a_replica_that_has_died_is_named() -> None:
    """What was sent to it was a broken pipe and a traceback, and so was each request that it had."""
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    process: Any = SimpleNamespace(name="replica 2", is_alive=lambda: False)
    replica = real_fleet._Replica(ReplicaId("r2"), process, ours)
    try:
        with pytest.raises(FleetFailed, match="replica 2 has died"):
            replica.stretch(2.0)
        with pytest.raises(FleetFailed, match="replica 2 has died"):
            await replica.wait_until_ready()
    finally:
        await replica.aclose()


async def test_requests_that_do_not_end_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a TimeoutError without a word."""
    monkeypatch.setattr(real_fleet, "END_TIMEOUT_S", 0.0)
    loop = asyncio.get_running_loop()
    router: Any = SimpleNamespace(vocab_size=100, take=lambda *_: SimpleNamespace(ended=loop.create_future()))
    workload = Workload("made", 16, (request(0.0, 16, 1, range(1), 0), request(0.0, 16, 1, range(1), 1)))
    with pytest.raises(FleetFailed, match="2 requests had not ended 0 s after the last one came"):
        await real_fleet._send(workload, [router], random.Random(0))
