"""Replicas killed under load: no client sees it, streams go on with the same text, and there is an end to it.

Every replica is killed with SIGKILL, the next as soon as three are ready again and whoever was there at the
last deaths would outlive one more, while 32 clients ask at 60 % of what two of them can answer.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.e2e.faults import checks, fleet, memory
from tests.e2e.faults.checks import Row
from tests.e2e.faults.cluster import Cluster, cluster, total
from tests.e2e.faults.injections import kill
from tests.e2e.faults.traffic import ClosedLoop, Outcome, Question, Traffic, answers, ask, clients, cycle

SHARE = 2.0

CLIENTS = 32
WARM_UP_S = 4.0
BACK_LIMIT_S = 120.0  # until three are ready again: a process, its imports, its announcement
LONG_PROMPT_TOKENS = 15_000  # seconds of prefill, 256 at a step: time to find out who has it
LONG_ANSWER_TOKENS = 600  # half a minute of stream
FIND_LIMIT_S = 20.0
MAX_ATTEMPTS = 3  # of the Router, as shipped
MORE_TOKENS = 2
HEARD_S = 0.5  # after a death a client may still be handed tokens that came before it
# Of streams that share a lost prefix with another: a Router that has not seen yet that they do knows of no
# common home, and where that has far more to do than the others they go elsewhere.
COMPUTED_TWICE = 0.5


@dataclass(frozen=True, slots=True)
class Death:
    """One replica killed."""

    at_s: float
    streaming: tuple[Outcome, ...]  # whose clients had tokens of it, and no end
    back_s: float  # until three were ready again


async def run(duration_s: float) -> list[Row]:
    """duration_s: of kills under load; what one request may cost comes on top."""
    async with cluster(fleet.spec()) as running:
        truth = await undisturbed(running, fleet.questions(), at_once=fleet.PREFIXES)
        return [
            *await under_load(running, truth, duration_s),
            *await _past_the_limit(running),
            *await _refused_for_good(running),
        ]


async def undisturbed(
    running: Cluster, questions: list[Question], *, at_once: int = 8
) -> dict[Question, str]:
    """The text of each answer while nothing is wrong. Raises AssertionError if one is not whole."""
    found = await answers(running.url, questions, at_once=at_once)
    assert not checks.failures(list(found.values())), checks.failures(list(found.values()))
    return {question: outcome.text for question, outcome in found.items()}


async def under_load(running: Cluster, truth: Mapping[Question, str], duration_s: float) -> list[Row]:
    """Replicas killed one after the other for that long, and what the clients saw."""
    rate = 0.6 * fleet.requests_per_s(2)
    draw = random.Random(1)
    deaths: list[Death] = []
    before = await running.metrics()
    load = ClosedLoop(running.url, cycle(truth), num_clients=CLIENTS, rate_per_s=rate)
    async with memory.watched(running) as watch, load as traffic:
        await asyncio.sleep(WARM_UP_S)
        ends_s = time.monotonic() + duration_s
        while not deaths or time.monotonic() < ends_s:
            await _until_all_outlive([death.at_s for death in deaths], traffic)
            deaths.append(await _one_death(running, traffic.running, draw))
        await asyncio.sleep(WARM_UP_S)
    after = await running.metrics()
    streaming = [outcome for death in deaths for outcome in death.streaming]
    kills = f"{len(deaths)} replicas killed under {CLIENTS} clients"
    return [
        checks.zero_errors(f"{kills}: client errors", traffic.outcomes),
        checks.no_truncated_stream(f"{kills}: streams that end early in silence", traffic.outcomes),
        checks.same_text("streams whose replica died go on with the same text", streaming, truth, share=0.99),
        checks.same_text("all streams, greedy and sampled: text", traffic.outcomes, truth),
        replay(before, after, deaths),
        checks.at_most(
            "three ready again after a kill, slowest", max(death.back_s for death in deaths), BACK_LIMIT_S
        ),
        memory.row("what lives through it grows, Routers and proxies together", watch),
    ]


async def _one_death(running: Cluster, under_way: list[Outcome], draw: random.Random) -> Death:
    replicas = await running.replicas()
    begun = [each for each in under_way if each.first_s is not None]
    busy = {each.replica for each in begun} & replicas.keys()
    replica_id = draw.choice(sorted(busy or replicas))
    streaming = tuple(each for each in begun if each.replica == replica_id)
    at_s = time.monotonic()
    await kill(replicas[replica_id])
    return Death(at_s, streaming, await running.until_ready())


async def _until_all_outlive(deaths_s: Sequence[float], traffic: Traffic) -> None:
    """Replicas may be back sooner than a stream ends: a third death under it, or a second without a token in
    between, would rightly end it. Raises TimeoutError."""
    async with asyncio.timeout(BACK_LIMIT_S):
        while True:
            if all(outlives_another(each, deaths_s) for each in traffic.running):
                return
            await asyncio.sleep(0.05)


def outlives_another(outcome: Outcome, deaths_s: Sequence[float]) -> bool:
    """Whether a request is promised to go on after one more death, if it was at all of these that it could be
    at."""
    met = [at for at in deaths_s if at >= outcome.sent_s]
    if not met:
        return True
    has_gone_on = bool(outcome.token_times) and outcome.token_times[-1] > met[-1] + HEARD_S
    return has_gone_on and len(met) + 1 < MAX_ATTEMPTS


def replay(before: Mapping[str, float], after: Mapping[str, float], deaths: Sequence[Death]) -> Row:
    """What continuations had to compute again: each prefix that only the dead replica held, and some twice.

    Their own tails and what they had generated come on top; what is cached elsewhere need not be computed.
    """

    def grown(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    cached = grown("warmpath_continued_tokens_total", source="cached")
    computed = grown("warmpath_continued_tokens_total", source="computed")
    streams = grown("warmpath_continuations_total")
    lost = sum(
        len({each.question.prompt[: fleet.PREFIX_TOKENS] for each in death.streaming}) for death in deaths
    )
    own = fleet.TAIL_TOKENS + fleet.MAX_TOKENS + fleet.BLOCK_SIZE
    prefixes = lost + COMPUTED_TWICE * max(streams - lost, 0.0)
    limit = prefixes * fleet.PREFIX_TOKENS + streams * own
    return Row(
        "tokens computed again for streams that went on elsewhere",
        f"<= {limit:.0f}: each lost prefix once, and for {COMPUTED_TWICE:.0%} of who shares one",
        f"{computed:.0f} of {cached + computed:.0f}, {streams:.0f} streams",
        0 < computed <= limit,
    )


async def _past_the_limit(running: Cluster) -> list[Row]:
    """Replicas killed under one stream, which goes on elsewhere until it has had all its attempts.

    Then its client is told, and cannot take what it has for the whole.
    """
    question = Question(tuple(range(10, 200)), LONG_ANSWER_TOKENS)
    outcome = Outcome(question, time.monotonic())
    async with clients() as client:
        asking = asyncio.create_task(ask(client, running.url, question, outcome))
        killed: set[int] = set()
        while len(killed) < MAX_ATTEMPTS and await _goes_on(asking, outcome):
            pid = await _who_computes(running, killed)
            await kill(pid)
            killed.add(pid)
        await asking
    end = "cut" if outcome.is_cut else "clean end"
    seen = f"{outcome.error}, {end}, after {len(outcome.token_times)} events with text"
    kept = outcome.error == "event too_many_deaths" and outcome.is_cut and not outcome.is_done
    deaths = len(killed)
    return [
        Row("a stream under which two replicas die", "goes on", f"ended after {deaths} deaths", deaths > 2),
        Row("a stream under which three replicas die", "error event, then a cut", seen, kept and deaths == 3),
        *await _comes_back(running, "after that stream"),
    ]


async def _refused_for_good(running: Cluster) -> list[Row]:
    """Two replicas killed before its first token: refused, and the third is left alone."""
    question = Question(tuple(10 + index % 900 for index in range(LONG_PROMPT_TOKENS)), 4)
    async with clients() as client:
        asking = asyncio.create_task(ask(client, running.url, question))
        killed: set[int] = set()
        for _ in range(2):
            pid = await _who_computes(running, killed)
            await kill(pid)
            killed.add(pid)
        survivors = set(running.live_replicas())
        outcome = await asking
    busy = await running.total("warmpath_requests_in_flight")
    seen = f"{outcome.error}, after {len(killed)} deaths; {busy:.0f} in flight"
    kept = outcome.error == "status 500 too_many_deaths" and busy == 0
    alive = survivors <= set(running.live_replicas()) and bool(survivors)
    return [
        Row("a request under which two replicas die", "refused, not retried", seen, kept),
        Row("the third replica", "left alone", "alive" if alive else "gone", alive),
        *await _comes_back(running, "after that request"),
    ]


async def _comes_back(running: Cluster, when: str) -> list[Row]:
    back_s = await running.until_ready()
    async with clients() as client:
        outcome = await ask(client, running.url, Question(tuple(range(10, 100)), 4))
    row = checks.at_most(f"the fleet is whole again {when}", back_s, BACK_LIMIT_S)
    return [row, checks.zero_errors(f"and answers {when}", [outcome])]


async def _who_computes(running: Cluster, killed: set[int]) -> int:
    """The process that has the only request there is. Raises TimeoutError."""
    async with asyncio.timeout(FIND_LIMIT_S):
        while True:
            for replica in (await running.version())["replicas"]:
                pid: int = replica["pid"]
                if replica["num_running"] and pid not in killed:
                    return pid
            await asyncio.sleep(0.02)


async def _goes_on(asking: asyncio.Task[Outcome], outcome: Outcome) -> bool:
    """Whether the client gets a few more tokens, and not an end. Raises TimeoutError if it gets neither."""
    had = len(outcome.token_times)
    async with asyncio.timeout(FIND_LIMIT_S):
        while len(outcome.token_times) <= had + MORE_TOKENS:
            if asking.done():
                return False
            await asyncio.sleep(0.02)
    return True
