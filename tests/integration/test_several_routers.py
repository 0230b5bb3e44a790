"""Two and three routers over the same four replicas: real engines, real sockets, no Ray.

What one has sent is known to the others through the engines alone. Every placement is production's
`Routing`; requests go from it straight to the engine's thread, as Serve would hand them over.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from cache.block_hash import BlockHasher
from cache.event_log import EventLog
from cache.messages import GenerateRequest, ReplicaInfo, SamplingParams
from cache.scheduling_order import SchedulingOrder
from cache.types import ReplicaId, RequestId
from replica.config import SimConfig
from replica.engine.engine import Engine
from replica.engine.engine_core import EngineCore
from replica.publisher import Publisher, new_epoch
from replica.runners.sim_runner import SimRunner
from router.events.subscriber import SubscriberGroup
from router.placement.placing import make_placer
from router.placement.routing import Placement, RouteQuery, Routing
from tests.fakes.engine import fingerprint, sim_config
from tests.fakes.router import config, info, replica_id

BLOCK = 16
MARK = fingerprint(BLOCK)
HASHER = BlockHasher(MARK)
NUM_REPLICAS = 4
ORDER = SchedulingOrder.SHORTEST_PREEMPTING
PROMPT_TOKENS = 30 * BLOCK + 5
# A prompt of that length takes about 50 ms alone.
SIM = SimConfig(base_s=0.002, per_token_s=0.0001, per_attention_s=0.0, per_sequence_s=0.0001)


class Replica:
    """One engine with its publisher."""

    def __init__(self, number: int, sim: SimConfig) -> None:
        self.name = replica_id(number)
        epoch = new_epoch()
        settings = sim_config(4096, sim=sim, block_size=BLOCK, max_running=64)
        self.publisher = Publisher(
            host="127.0.0.1",
            port=0,
            epoch=epoch,
            order=ORDER,
            max_batched_tokens=settings.max_batched_tokens,
        )
        self.log = EventLog(epoch)
        core = EngineCore(SimRunner(settings.sim, block_size=BLOCK), settings, HASHER, sink=self.log)
        self.engine = Engine(
            core, settings, events=self.log, publish=self.publisher.publish, door=self.publisher
        )
        self.publisher.start()
        self.engine.start()

    @property
    def info(self) -> ReplicaInfo:
        return info(
            fingerprint=MARK,
            event_endpoint=self.publisher.event_endpoint,
            snapshot_endpoint=self.publisher.snapshot_endpoint,
            scheduling_order=ORDER,
        )

    async def aclose(self) -> None:
        await self.engine.aclose()
        self.publisher.close()


class Router:
    """A router's core and its ears."""

    def __init__(self, place: int, num_routers: int, binding: str = "at_once") -> None:
        self.place = place
        # Who may wait is not asked here: a burst that a machine draws out for long looks like overload.
        settings = config(fingerprint=MARK, seed=place, binding=binding, overload_wait_s=10.0)
        self.routing = Routing(settings, peers=lambda: (self.place, num_routers))
        self.placer = make_placer(settings, self.routing, time.monotonic)
        self.subscribers = SubscriberGroup(self.routing)
        self.routing.watch_membership(self.subscribers.update)

    def query(self, name: str, prompt: array[int]) -> RouteQuery:
        return RouteQuery(RequestId(name), HASHER.chain(HASHER.root(), prompt), len(prompt), max_tokens=4)

    async def aclose(self) -> None:
        self.placer.close()
        await self.subscribers.aclose()

    def load(self, name: ReplicaId) -> tuple[int, int]:
        """(requests running and waiting there, tokens they still have to prefill), as this router knows."""
        view = self.routing._loads.view(name)
        return view.num_requests, view.queued_tokens


class Fleet:
    """Replicas and routers, and requests through them."""

    def __init__(self, num_routers: int, sim: SimConfig = SIM, *, binding: str = "at_once") -> None:
        self.replicas = {replica_id(n): Replica(n, sim) for n in range(NUM_REPLICAS)}
        self.routers = [Router(place, num_routers, binding) for place in range(num_routers)]
        self.served: Counter[ReplicaId] = Counter()
        self.cached: Counter[ReplicaId] = Counter()  # tokens

    async def __aenter__(self) -> Fleet:
        for router in self.routers:
            router.routing.update_replicas({name: replica.info for name, replica in self.replicas.items()})
        await until(lambda: all(router.subscribers.all_synced() for router in self.routers))
        return self

    async def __aexit__(self, *_: object) -> None:
        for router in self.routers:
            await router.aclose()
        for replica in self.replicas.values():
            await replica.aclose()

    def send(self, router: Router, name: str, prompt: array[int]) -> asyncio.Task[None]:
        """Placed with the loop's next turn, or when the router's binding says so."""
        return asyncio.create_task(self._serve(router, name, prompt))

    async def _serve(self, router: Router, name: str, prompt: array[int]) -> None:
        try:
            query = router.query(name, prompt)
            placement = await router.placer.place(query, since=time.monotonic(), deadline=None)
            await self.generate(router, name, prompt, placement)
        finally:
            router.routing.release(RequestId(name))
            router.routing.finish(RequestId(name))

    async def generate(self, router: Router, name: str, prompt: array[int], placement: Placement) -> None:
        replica = self.replicas[placement.replica_id]
        router.routing.routed(RequestId(name), replica.name)
        request = GenerateRequest(
            RequestId(name), prompt, len(prompt), SamplingParams(max_tokens=4), 0,
            block_hashes=placement.block_hashes,
        )  # fmt: skip
        self.served[replica.name] += 1
        async with contextlib.aclosing(replica.engine.generate(request)) as deltas:
            async for delta in deltas:
                cached = delta.cached_tokens
        self.cached[replica.name] += cached

    async def burst(self, prompts: Sequence[array[int]], pause_s: float) -> None:
        """All of them, the routers taking turns; over when the last one is."""
        jobs = []
        for number, prompt in enumerate(prompts):
            jobs.append(self.send(self.routers[number % len(self.routers)], f"r{number}", prompt))
            if pause_s:
                await asyncio.sleep(pause_s)
        await asyncio.gather(*jobs)

    async def warm_up(self) -> None:
        """Prompts of many lengths everywhere, until each engine knows its pace and every router hears it."""
        for number in range(16):
            prompt = array("i", range(number, number + 16 + number * 110 % 400))
            jobs = []
            for name, replica in self.replicas.items():
                request = GenerateRequest(
                    RequestId(f"warm {name} {number}"), prompt, len(prompt), SamplingParams(max_tokens=2), 0
                )
                jobs.append(drain(replica.engine, request))
            await asyncio.gather(*jobs)
        await until(lambda: all(self._knows_pace(router) for router in self.routers))

    def _knows_pace(self, router: Router) -> bool:
        views = [router.routing._loads.view(name) for name in self.replicas]
        return all(view.step_time is not None and not view.num_requests for view in views)


async def drain(engine: Engine, request: GenerateRequest) -> None:
    async with contextlib.aclosing(engine.generate(request)) as deltas:
        async for _ in deltas:
            pass


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - sockets and threads have no event to wait for
            await asyncio.sleep(0.005)


def cold(number: int) -> array[int]:
    """Prompts of one length with nothing in common."""
    return array("i", [(number * 7919 + i * (number + 1)) % 997 for i in range(PROMPT_TOKENS)])


@pytest.mark.parametrize("num_routers", [2, 3])
async def test_every_router_sees_every_engine(num_routers: int) -> None:
    async with Fleet(num_routers) as fleet:
        jobs = [fleet.send(fleet.routers[n % num_routers], f"r{n}", cold(n)) for n in range(12)]
        await asyncio.gather(*jobs)
        assert len(fleet.served) == NUM_REPLICAS
        for replica in fleet.replicas.values():
            await until(lambda replica=replica: not replica.log.has_changes)
            truth = replica.log.digest
            assert truth.count
            for router in fleet.routers:
                await until(lambda: router.routing._index.digest(replica.name) == truth)  # noqa: B023
        for router in fleet.routers:
            counters = router.subscribers.statistics().counters
            assert counters.applied
            assert counters.lost == 0


async def test_what_one_router_has_sent_is_known_to_the_other_while_the_engine_is_inside_a_step() -> None:
    """One publication after it arrives, not when the step is over: 0.6 s here."""
    async with Fleet(2, SimConfig(base_s=0.6)) as fleet:
        one, other = fleet.routers
        jobs = [fleet.send(one, "first", cold(0))]
        await asyncio.sleep(0)
        busy = one.routing._loads.placed(RequestId("first"))
        assert busy is not None
        engine = fleet.replicas[busy].engine
        await until(lambda: other.load(busy)[0] == 1)
        for number in range(3):  # all on the busy one, whatever the cost says
            name, prompt = f"more {number}", cold(number + 1)
            placement = one.routing.choose(one.query(name, prompt))._replace(ranks=(busy,))
            jobs.append(asyncio.create_task(fleet.generate(one, name, prompt, placement)))
        num_steps = engine.stats().num_steps
        await until(
            lambda: other.load(busy) == (4, 4 * PROMPT_TOKENS) or engine.stats().num_steps > num_steps
        )
        assert engine.stats().num_steps == num_steps  # the engine has not said a word since
        assert one.load(busy) == other.load(busy)  # and the sender does not count them twice
        assert other.routing.choose(other.query("elsewhere", cold(99))).replica_id != busy
        await asyncio.gather(*jobs)


async def test_what_another_routers_prompts_are_like_is_known_inside_a_step_as_well() -> None:
    """Of two that wait behind a long step, by one Router, the other knows which stands back for its own."""
    async with Fleet(2, SimConfig(base_s=0.15)) as fleet:
        one, other = fleet.routers
        await fleet.warm_up()
        busy = replica_id(0)
        jobs = []
        for count, (name, prompt) in enumerate(
            (("first", cold(1)[:40]), ("short", cold(2)[:20]), ("long", cold(3)))
        ):
            placement = one.routing.choose(one.query(name, prompt))._replace(ranks=(busy,))
            jobs.append(asyncio.create_task(fleet.generate(one, name, prompt, placement)))
            await until(lambda count=count: other.load(busy)[0] == count + 1)
        asks = other.query("asks", cold(4)[:200])
        asks = asks._replace(excluded=frozenset(fleet.replicas) - {busy})
        price = other.routing.weigh(asks).ranking.best.price
        assert price is not None
        assert price.passed_s == pytest.approx(price.step_time.prefill_s(200, 0, 512), rel=0.01)
        await asyncio.gather(*jobs)


# At once: no router can have heard of the other's. Over 0.1 s: while the first ones are being computed.
BURSTS = pytest.mark.parametrize(
    ("is_warm", "pause_s"),
    [(True, 0.0), (False, 0.0), (True, 0.0015)],
    ids=["at once", "at once, speed unknown", "over 0.1 s"],
)


BINDINGS = pytest.mark.parametrize("binding", ["at_once", "late"])


@BINDINGS
@BURSTS
async def test_a_burst_of_cold_prompts_overloads_nobody(is_warm: bool, pause_s: float, binding: str) -> None:
    """64 of them, half through each router: no replica gets more than 40 %."""
    async with Fleet(2, binding=binding) as fleet:
        if is_warm:
            await fleet.warm_up()
        await fleet.burst([cold(number) for number in range(64)], pause_s)
        assert sum(fleet.served.values()) == 64
        assert max(fleet.served.values()) <= 0.4 * 64, fleet.served
        assert len(fleet.served) == NUM_REPLICAS


@BINDINGS
@BURSTS
async def test_a_burst_of_equal_prompts_is_computed_once_per_router(
    is_warm: bool, pause_s: float, binding: str
) -> None:
    async with Fleet(2, binding=binding) as fleet:
        if is_warm:
            await fleet.warm_up()
        await fleet.burst([cold(7)] * 64, pause_s)
        assert sum(fleet.served.values()) == 64
        assert len(fleet.served) <= 2, fleet.served
        # All but the first on each replica found every block they could.
        usable = (PROMPT_TOKENS - 1) // BLOCK * BLOCK
        assert sum(fleet.cached.values()) == (64 - len(fleet.served)) * usable


@pytest.mark.parametrize(
    ("num_routers", "binding"),
    [
        pytest.param(1, "at_once", marks=(pytest.mark.long, pytest.mark.broad)),
        (1, "late"),
        (2, "at_once"),
        (2, "late"),
    ],
)
async def test_unique_prompts_one_after_another_spread_evenly(num_routers: int, binding: str) -> None:
    async with Fleet(num_routers, binding=binding) as fleet:
        await fleet.warm_up()
        for number in range(40):
            await fleet.send(fleet.routers[number % num_routers], f"r{number}", cold(number))
        assert sorted(fleet.served) == sorted(fleet.replicas)
        assert max(fleet.served.values()) - min(fleet.served.values()) <= 6, fleet.served


async def test_a_router_that_starts_later_knows_what_the_others_do() -> None:
    async with Fleet(1) as fleet:
        jobs = [fleet.send(fleet.routers[0], f"r{n}", cold(n)) for n in range(8)]
        await asyncio.gather(*jobs)
        late = Router(1, 2)
        try:
            late.routing.update_replicas({name: r.info for name, r in fleet.replicas.items()})
            await until(late.subscribers.all_synced)
            for name in fleet.replicas:
                first = fleet.routers[0].routing._index.digest(name)
                assert late.routing._index.digest(name) == first
            chains: Sequence[array[int]] = [cold(n) for n in range(8)]
            for number, prompt in enumerate(chains):
                placement = late.routing.choose(late.query(f"again {number}", prompt))
                assert placement.overlap_blocks == PROMPT_TOKENS // BLOCK
        finally:
            await late.aclose()
