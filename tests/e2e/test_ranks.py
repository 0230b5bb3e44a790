"""A replica of two ranks under a real Serve: it answers, says what it is, and ends where one of them does.

There is no other replica: who asks until it is replaced is told so.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.e2e.faults import checks
from tests.e2e.faults.injections import kill
from tests.e2e.faults.processes import REPLICA, Process, descendants, read
from tests.e2e.faults.traffic import ClosedLoop, Question, ask, one_client
from tests.servers import Server, processes_below, running_server

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

FOLLOWER = "-m replica.runners.follower"
SHORT = Question(tuple(range(10, 100)), max_tokens=8)
LONG = Question(tuple(range(100, 200)), max_tokens=1000)
TOLD = {"status 503 no_replica", "event no_replica"}
ENDS_WITHIN_S = 10.0
LIMIT_S = 120.0  # of an answer
BACK_WITHIN_S = 240.0  # two ranks load where a dozen other processes compute: Serve restarts it, or never


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    replica = {"device": "cpu", "tensor_parallel": 2}
    with running_server(replicas=1, replica=replica) as running:
        yield running


def replica_process(server: Server) -> Process:
    (found,) = (each for each in descendants(server.process.pid) if each.command.startswith(REPLICA))
    return found


def followers(server: Server) -> list[Process]:
    """Of this server, whoever their parents are by now."""
    pids = [int(line.partition(":")[0]) for line in processes_below(server.temp) if FOLLOWER in line]
    return [each for each in map(read, pids) if each is not None and each.is_alive]


def is_gone(pid: int) -> bool:
    process = read(pid)
    return process is None or not process.is_alive


def is_replaced(server: Server, old: set[int]) -> bool:
    try:
        pids = {each["pid"] for each in server.version()["replicas"]}
    except (httpx.HTTPError, KeyError):
        return False
    return bool(pids - old)


async def until(is_so: Callable[[], bool], what: str, limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not await asyncio.to_thread(is_so):
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.05)


def test_it_says_how_many_ranks_compute(server: Server) -> None:
    (shown,) = server.version()["replicas"]
    assert (shown["device"], shown["num_ranks"]) == ("cpu", 2)
    assert "cpu, 2 ranks, float32, gather_sdpa attention, " in server.log.read_text()


async def test_a_killed_follower_ends_its_replica(server: Server) -> None:
    replica, (follower,) = replica_process(server), followers(server)
    await killed_and_replaced(server, kill_pid=follower.pid, other_pid=replica.pid)
    # Serve writes lines down when there are many, or when one is grave: so by now those of the dead.
    logged = "\n".join(log.read_text() for log in server.temp.rglob("replica_warmpath_Replica_*.log"))
    assert "ready: cpu, 2 ranks, gather_sdpa attention, " in logged
    assert logged.count("its part of every sequence rank=1 exit_code=-9\n") == 1


@pytest.mark.broad  # as of rank 0 alone in tests/integration/test_tensor_parallel.py
async def test_no_follower_outlives_a_killed_replica(server: Server) -> None:
    replica, (follower,) = replica_process(server), followers(server)
    await killed_and_replaced(server, kill_pid=replica.pid, other_pid=follower.pid)


async def killed_and_replaced(server: Server, *, kill_pid: int, other_pid: int) -> None:
    """Kill one of the replica's two ranks under load: the other ends, clients are told, and then served."""
    old = {kill_pid, other_pid}
    async with one_client() as client:
        undisturbed = await ask(client, server.url, SHORT)
    assert undisturbed.is_whole, undisturbed

    async with ClosedLoop(server.url, itertools.repeat(SHORT), num_clients=2, rate_per_s=8) as traffic:
        _, stream = traffic.begin(LONG)
        await until(lambda: len(stream.token_times) > 2, "no tokens", LIMIT_S)
        killed_s = await kill(kill_pid)
        await until(lambda: is_gone(other_pid), "the other rank goes on alone", ENDS_WITHIN_S)
        left_s = killed_s + BACK_WITHIN_S - time.monotonic()
        await until(lambda: is_replaced(server, old), "not replaced", left_s)
        back_s = time.monotonic()
        # Both clients may still be waiting for an answer that was asked for before.
        await until(lambda: any(each.sent_s > back_s for each in traffic.outcomes), "nobody asks", LIMIT_S)
        await asyncio.sleep(2.0)

    assert (stream.failure, stream.is_cut) == ("event no_replica", True)
    assert set(checks.failures(traffic.outcomes)) <= TOLD
    later = [each for each in traffic.outcomes if each.sent_s > back_s]
    assert later
    assert all(each.is_whole for each in later)
    assert {each.text for each in traffic.outcomes if each.is_whole} == {undisturbed.text}

    replica, (follower,) = replica_process(server), followers(server)
    assert follower.parent == replica.pid
    assert not old & {replica.pid, follower.pid}
