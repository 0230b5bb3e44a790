"""Replicas come while work waits and go when there is none, under a real Serve; no client notices.

Replicas are simulated: a prompt is a sleep of modelled length, so how much one can do is known.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator

import pytest

from replica.config import SimConfig
from tests.e2e.faults.traffic import ClosedLoop, Question, answers, ask, clients
from tests.http_server import engine_server
from tests.servers import Server, running_server

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

MOST = 3
NUM_BLOCKS = 4096
PROMPT_TOKENS = 200
TOKEN_S = 0.002  # a prompt is 0.4 s of a replica's time: eight clients are more than two replicas' work
STREAMS, STREAM_TOKENS, STEP_S = 6, 1000, 0.02  # of 20 s, while replicas leave under them
GIVEN_S = 4  # to a replica that leaves: less than its streams take, so they go on elsewhere
LIMIT_S = 180.0  # until a replica has come or gone, on a busy machine


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = {
        "num_replicas": None,
        "graceful_shutdown_timeout_s": GIVEN_S,
        "autoscaling_config": {
            "min_replicas": 1,
            "max_replicas": MOST,
            "metrics_interval_s": 1,
            "look_back_period_s": 3,
            "upscale_delay_s": 1,
            "downscale_delay_s": 4,
            "policy": {
                "policy_function": "deploy.autoscaling:QueuedWork",
                "policy_kwargs": {"target_queued_s": 0.3},
            },
        },
    }
    sim = {"base_s": STEP_S, "per_token_s": TOKEN_S, "per_attention_s": 0.0, "per_sequence_s": 0.0}
    with running_server(
        replica={"runner": "simulated", "sim": sim, "num_blocks": NUM_BLOCKS},
        # Whoever comes is taken in: eight that wait are no overload, but a slow machine may look like one.
        router={"max_wait_s": 60.0, "overload_wait_s": 60.0},
        deployments={"Replica": options},
    ) as running:
        yield running


def short_prompts(seed: int) -> Iterator[Question]:
    """Nobody has any of them cached."""
    draw = random.Random(seed)
    while True:
        yield Question(tuple(draw.randrange(10, 1000) for _ in range(PROMPT_TOKENS)), max_tokens=1)


def long_streams(seed: int) -> list[Question]:
    draw = random.Random(seed)
    return [
        Question(tuple(draw.randrange(10, 1000) for _ in range(20)), STREAM_TOKENS, 1.0, seed=number)
        for number in range(STREAMS)
    ]


async def undisturbed(questions: list[Question]) -> list[str]:
    """Each one's text, by a replica that nobody takes away, in this process; its steps take no time."""
    sim = SimConfig(base_s=0.0, per_token_s=0.0, per_attention_s=0.0, per_sequence_s=0.0)
    with engine_server(
        num_replicas=1, num_blocks=NUM_BLOCKS, replica={"runner": "simulated", "sim": sim}
    ) as quick:
        truth = await answers(quick.url, questions, at_once=STREAMS)
    assert [each.failure for each in truth.values()] == [None] * len(questions)
    return [truth[question].text for question in questions]


def replicas(server: Server) -> set[str]:
    return {each["replica_id"] for each in server.version()["replicas"]}


async def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not await asyncio.to_thread(is_so):
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.25)


async def test_replicas_come_with_work_and_go_without_and_no_stream_is_cut(server: Server) -> None:
    assert len(replicas(server)) == 1
    questions = long_streams(seed=1)
    async with ClosedLoop(server.url, short_prompts(seed=0), num_clients=8) as load:

        def served_by() -> set[str]:
            return {each.replica for each in load.ended if each.replica}

        await until(lambda: len(replicas(server)) == MOST, "not scaled up under load")
        newest = replicas(server)
        await until(lambda: newest <= served_by(), "a new replica was left without work")
        load.stop()
        async with clients() as client:
            streams = [asyncio.create_task(ask(client, server.url, each)) for each in questions]
            await until(lambda: len(replicas(server)) < MOST, "not scaled down")
            assert not all(stream.done() for stream in streams), "no stream was there to be cut"
            heard = await asyncio.gather(*streams)
    failed = [each.failure for each in load.outcomes if each.failure is not None]
    assert failed == []
    assert [each.failure for each in heard] == [None] * STREAMS
    await until(lambda: len(replicas(server)) == 1, "not scaled down to the least")
    assert [each.text for each in heard] == await undisturbed(questions)


async def test_one_that_comes_again_works_again(server: Server) -> None:
    """Down to one and up once more: nothing of the first time is in the way."""
    await until(lambda: len(replicas(server)) == 1, "still more than one")
    old = replicas(server)
    async with ClosedLoop(server.url, short_prompts(seed=2), num_clients=8) as load:
        await until(lambda: len(replicas(server)) > 1, "not scaled up again")
        fresh = replicas(server) - old
        await until(lambda: bool(fresh & {each.replica for each in load.ended}), "without work")
    assert [each.failure for each in load.outcomes if each.failure is not None] == []
