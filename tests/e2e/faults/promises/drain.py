"""Replicas and Routers that leave under 16 long streams: none fails, none is cut, nothing is done twice.

The time a replica is given is shorter than the streams are long, so that they must go on elsewhere: they are
handed over, not lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from tests.e2e.faults import checks, fleet
from tests.e2e.faults.checks import Row
from tests.e2e.faults.cluster import Cluster, Spec, cluster
from tests.e2e.faults.traffic import ClosedLoop, Outcome, Question, answers, conversations, cycle

SHARE = 2.0

STREAMS = 16
STREAM_TOKENS = 220  # a quarter of a minute
GIVEN_S = 6  # to a replica: less than a stream takes
ROUTER_GIVEN_S = 60
WARM_UP_PROBES = 12  # for each prefix: then it is hot at every Router
PROBES_PER_S = 10.0
BURST = 4  # requests at once for each hot prefix of a replica that leaves
PREFIXES, PREFIX_TOKENS = 9, 1024
KNOWN_WITHIN_S = 1.0  # after which a replica that leaves gets nothing new
ALL_AT_LEAST_S = 90.0  # of load: with less, one redeploy changes everything at once
LIMIT_S = 240.0  # until a change is through: replicas are replaced two at a time


def spec() -> Spec:
    """As `fleet.spec`, with room for everything hot on any two replicas, and little time to leave."""
    base = fleet.spec()
    return Spec(
        replicas=base.replicas,
        routers=base.routers,
        replica={**base.replica, "num_blocks": 4096},
        deployments={
            "Replica": {"graceful_shutdown_timeout_s": GIVEN_S, "rolling_update_percentage": 0.67},
            "Router": {"graceful_shutdown_timeout_s": ROUTER_GIVEN_S},
        },
    )


async def run(duration_s: float) -> list[Row]:
    """duration_s: little: a scale-down, and one redeploy of everything with another block size; more: each
    kind of change by itself, too."""
    long = conversations(
        num_prefixes=STREAMS, prefix_tokens=40, tail_tokens=8, max_tokens=STREAM_TOKENS, variants=1, seed=5
    )
    async with cluster(spec()) as running:
        truth = await _undisturbed(running, long)
        rows = await _scale_down(running, truth)
        await running.restore()
        if duration_s >= ALL_AT_LEAST_S:
            rows += await _replaced(
                running,
                truth,
                "rolling redeploy of replicas",
                lambda: running.redeploy(replica={"max_waiting": 255}),
            )
            rows += await _replaced(
                running,
                truth,
                "rolling redeploy of Routers",
                lambda: running.change_routers({"debug_requests": 1023}),
            )
        rows += await _replaced(
            running,
            truth,
            "redeploy with another block size",
            lambda: running.redeploy(replica={"block_size": 2 * fleet.BLOCK_SIZE}),
        )
        return rows


async def _scale_down(running: Cluster, truth: Mapping[Question, str]) -> list[Row]:
    what = "scale-down from 3 to 2"
    async with _under_load(running, truth) as load:
        await running.scale("Replica", 2)
        await load.until_stopped()
        asked = load.burst()
        await running.until_ready(limit_s=LIMIT_S)
    return [*load.rows(what, truth), _recomputed(what, load, asked), _known(what, load)]


async def _replaced(
    running: Cluster, truth: Mapping[Question, str], what: str, change: Callable[[], Awaitable[None]]
) -> list[Row]:
    """A change that replaces processes, from before it until all of them are new and ready."""
    before = set(running.live_replicas()) | set(running.routers())
    async with _under_load(running, truth) as load:
        await change()
        await _until(lambda: not before <= set(running.live_replicas()) | set(running.routers()))
        await running.until_ready(limit_s=LIMIT_S)
    rows = load.rows(what, truth)
    return [*rows, _known(what, load)] if load.stopped_at else rows


async def _undisturbed(running: Cluster, questions: Sequence[Question]) -> dict[Question, str]:
    found = await answers(running.url, questions, at_once=STREAMS)
    assert not checks.failures(list(found.values())), checks.failures(list(found.values()))
    return {question: outcome.text for question, outcome in found.items()}


@dataclass(slots=True)
class Load:
    """Long streams, short requests for hot prefixes, and what Serve says of its replicas meanwhile."""

    streams: ClosedLoop
    probes: ClosedLoop
    spare: Iterator[Question]  # probes of tails of their own, for bursts
    stopped_at: dict[str, float] = field(default_factory=dict)  # `time.monotonic()`, by replica id

    async def until_stopped(self) -> None:
        await _until(lambda: bool(self.stopped_at), poll_s=0.01)

    def homes(self) -> dict[tuple[int, ...], str]:
        """Who answered last for each hot prefix, before a replica was stopped."""
        first_stop = min(self.stopped_at.values())
        done = [each for each in self.probes.ended if each.replica and each.sent_s < first_stop]
        return {each.question.prompt[:PREFIX_TOKENS]: each.replica or "" for each in done}

    def burst(self) -> set[tuple[int, ...]]:
        """Ask for every hot prefix of the stopped replicas, several at once; which they are."""
        theirs = {prefix for prefix, home in self.homes().items() if home in self.stopped_at}
        wanted = Counter(dict.fromkeys(theirs, BURST))
        while wanted:
            question = next(self.spare)
            prefix = question.prompt[:PREFIX_TOKENS]
            if wanted[prefix] > 0:
                self.probes.begin(question)
                wanted[prefix] -= 1
            wanted = +wanted
        return theirs

    @property
    def outcomes(self) -> list[Outcome]:
        return [*self.streams.outcomes, *self.probes.outcomes]

    def rows(self, what: str, truth: Mapping[Question, str]) -> list[Row]:
        return [
            checks.zero_errors(f"{what}: client errors", self.outcomes),
            checks.same_text(f"{what}: {STREAMS} long streams at a time, text", self.streams.outcomes, truth),
        ]


@contextlib.asynccontextmanager
async def _under_load(running: Cluster, truth: Mapping[Question, str]) -> AsyncIterator[Load]:
    short = conversations(
        num_prefixes=PREFIXES, prefix_tokens=PREFIX_TOKENS, tail_tokens=24, max_tokens=4, variants=60, seed=6
    )
    spare = cycle(
        conversations(
            num_prefixes=PREFIXES,
            prefix_tokens=PREFIX_TOKENS,
            tail_tokens=25,
            max_tokens=4,
            variants=8,
            seed=6,
        )
    )
    streams = ClosedLoop(running.url, cycle(truth), num_clients=STREAMS)
    probes = ClosedLoop(running.url, cycle(short), num_clients=8, rate_per_s=PROBES_PER_S)
    async with streams, probes:
        load = Load(streams, probes, spare)
        await _until(lambda: len(probes.ended) >= WARM_UP_PROBES * PREFIXES)
        watching = asyncio.create_task(_watch(running, load.stopped_at))
        try:
            yield load
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def _watch(running: Cluster, stopped_at: dict[str, float]) -> None:
    """When Serve was first seen to be stopping each replica."""
    while True:
        with contextlib.suppress(httpx.HTTPError, KeyError):
            application = await running.applications()
            for replica in application["deployments"]["Replica"]["replicas"]:
                if replica["state"] == "STOPPING":
                    stopped_at.setdefault(replica["replica_id"], time.monotonic())
        await asyncio.sleep(0.05)


def _known(what: str, load: Load) -> Row:
    """Nothing is given to a replica that leaves once that can be known."""
    late = [
        each.sent_s - load.stopped_at[each.replica]
        for each in load.outcomes
        if each.replica in load.stopped_at and each.sent_s > load.stopped_at[each.replica]
    ]
    named = (
        f"{what}: last new request to one of {len(load.stopped_at)} leaving replicas, after it began to leave"
    )
    return checks.at_most(named, max(late, default=0.0), KNOWN_WITHIN_S)


def _recomputed(what: str, load: Load, prefixes: set[tuple[int, ...]]) -> Row:
    """How often each hot prefix of the leaving replicas was computed again, and on how many others."""
    promise, target = f"{what}: its hot prefixes computed again", "each at most once, on one replica"
    if not prefixes:
        return checks.not_run(promise, target, "the replica that left had none")
    stopped = min(load.stopped_at.values())
    again: dict[tuple[int, ...], list[str]] = {prefix: [] for prefix in prefixes}
    for each in load.probes.outcomes:
        prefix = each.question.prompt[:PREFIX_TOKENS]
        if prefix in again and each.sent_s >= stopped and each.is_whole:
            if (each.cached_tokens or 0) < PREFIX_TOKENS // 2:
                again[prefix].append(each.replica or "")
    most = max(len(where) for where in again.values())
    on = max(len(set(where)) for where in again.values())
    measured = f"{len(prefixes)} prefixes, {BURST} at once: at most {most} times, on {on} replicas"
    return Row(promise, target, measured, most <= 1 and on <= 1)


async def _until(condition: Callable[[], bool], *, poll_s: float = 0.1, limit_s: float = LIMIT_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - processes and Serve have no event to wait for
            await asyncio.sleep(poll_s)
