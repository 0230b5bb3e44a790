"""The real tiny model: streams whose replica is killed go on with the text of an undisturbed run."""

from __future__ import annotations

import asyncio
import random
import time

from tests.e2e.faults import checks
from tests.e2e.faults.checks import Row
from tests.e2e.faults.cluster import Spec, cluster
from tests.e2e.faults.injections import kill
from tests.e2e.faults.promises.replica_deaths import undisturbed
from tests.e2e.faults.traffic import Outcome, Question, ask, clients

SHARE = 0.3

STREAMS = 16  # half greedy, half sampled with a seed
MAX_TOKENS = 160
TOKENS_BEFORE = 4  # that each client of the replica has before it is killed
BEGIN_LIMIT_S = 60.0


async def run(duration_s: float) -> list[Row]:
    """duration_s: replicas are killed anew until it is over; once at least."""
    outcomes: list[Outcome] = []
    struck: list[Outcome] = []
    questions = _questions()
    async with cluster(Spec(replica={"runner": "model"}, routers=1)) as running:
        truth = await undisturbed(running, questions)
        ends_s = time.monotonic() + duration_s
        while not struck or time.monotonic() < ends_s:
            seen = [Outcome(question, time.monotonic()) for question in questions]
            async with clients() as client:
                asking = [asyncio.create_task(ask(client, running.url, each.question, each)) for each in seen]
                await _have_begun(seen)
                replicas = await running.replicas()
                counts = {name: sum(each.replica == name for each in seen) for name in replicas}
                victim = max(counts, key=counts.__getitem__)
                struck += [each for each in seen if each.replica == victim and each.ended_s is None]
                await kill(replicas[victim])
                await asyncio.gather(*asking)
            outcomes += seen
            await running.until_ready()
    return [
        checks.same_text(
            "real model: streams whose replica died, greedy and sampled", struck, truth, share=0.99
        ),
        checks.same_text("real model: all streams", outcomes, truth),
    ]


async def _have_begun(outcomes: list[Outcome]) -> None:
    async with asyncio.timeout(BEGIN_LIMIT_S):
        while True:
            if all(len(each.token_times) >= TOKENS_BEFORE for each in outcomes):
                return
            await asyncio.sleep(0.01)


def _questions() -> list[Question]:
    draw = random.Random(3)
    found = []
    for index in range(STREAMS):
        prompt = tuple(draw.randrange(10, 1000) for _ in range(100))
        is_sampled = bool(index % 2)
        found.append(Question(prompt, MAX_TOKENS, float(is_sampled), index if is_sampled else None))
    return found
