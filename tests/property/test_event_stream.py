"""Whatever happens to the engines' events on the way, every router's index ends as the union of their caches.

Real engines (scheduler, cache and log over the simulated runner, with pools so small that they evict all the
time), real `Routing`, and between them a channel that loses, repeats, reorders and delays; engines and
routers restart, replicas leave and come back, snapshots are answered late and applied slice by slice. Once
things are quiet for a few heartbeats, index and truth are equal.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Generator
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block_hash import BlockHasher
from cache.block_hash import hints as to_hints
from cache.event_log import EventLog
from cache.events import FORMAT_VERSION, Digest, EventBatch, Load, LoadUpdate, Snapshot, digest_of
from cache.types import BlockHash, HashHint, ReplicaId, RequestId
from replica.engine.engine_core import EngineCore
from router.errors import AllBusy
from router.events.event_stream import EventStream
from router.index import snapshot_slices
from router.placement.routing import RouteQuery, Routing
from tests.fakes.engine import BLOCK_SIZE, fingerprint, make_request, sim_core
from tests.fakes.router import FakeClock, config, info, replica_id
from tests.fakes.routing import whole

HASHER = BlockHasher(fingerprint())
NUM_BLOCKS = 14
# Prompts that share heads: trunk t, and after its first blocks a branch of its own.
PROMPTS = [
    array(
        "i",
        [*(100 * trunk + i for i in range(4 * shared)), *(500 + 50 * branch + i for i in range(4 * own))],
    )
    for trunk in range(2)
    for shared, own, branch in ((1, 0, 0), (2, 2, 1), (4, 0, 2), (3, 3, 3), (2, 5, 4))
]
CHAINS: list[list[BlockHash]] = [HASHER.chain(HASHER.root(), prompt) for prompt in PROMPTS]


class Engine:
    """One replica: what it caches, and what it says of that."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_lives = 0
        self.digests: dict[tuple[int, int], Digest] = {}  # (epoch, seq) -> of the cache then
        self.restart()

    def restart(self) -> None:
        self.num_lives += 1
        self.log = EventLog(self.num_lives * 7919 + self.number, clock=lambda: float(self.log.seq))
        self.core: EngineCore = sim_core(NUM_BLOCKS, sink=self.log)
        self.num_requests = 0
        self.num_updates = 0
        self.digests[self.log.epoch, 0] = Digest()

    def work(self, prompt: int, num_steps: int) -> list[EventBatch]:
        """Take a request in and compute some steps of all that is there; a batch after each."""
        self.num_requests += 1
        name = f"{self.num_lives}/{self.num_requests}"
        self.core.submit(make_request(name, PROMPTS[prompt], max_tokens=1 + prompt % 3))
        batches = []
        for _ in range(num_steps):
            self.core.step()
            batches.append(self.flush())
        return batches

    def flush(self) -> EventBatch:
        self.num_updates = 0
        batch = self.log.flush(self.load())
        self.digests[batch.epoch, batch.seq] = batch.digest
        # What is announced is what is there: nothing removed whose last copy is not gone, nothing kept.
        assert batch.digest == digest_of(self.cached)
        return batch

    def update(self) -> LoadUpdate:
        self.num_updates += 1
        load = Load(num_running=self.log.seq, num_waiting=self.num_updates)
        return LoadUpdate(FORMAT_VERSION, self.log.epoch, self.log.seq, self.num_updates, load)

    def snapshot(self) -> Snapshot:
        return self.log.snapshot(Load(num_running=self.log.seq))

    def load(self) -> Load:
        return Load(num_running=self.log.seq + 1)

    @property
    def cached(self) -> set[HashHint]:
        return set(to_hints(self.core._cache.pool.cached_hashes()))


class Link:
    """One router's way to one engine: the stream, and what has not arrived."""

    def __init__(self, routing: Routing, replica: ReplicaId) -> None:
        self.replica = replica
        self.stream = EventStream(replica, routing, clock=lambda: 0.0, max_waiting=5)
        self.stream.start()
        self.on_the_way: list[EventBatch | LoadUpdate] = []
        self.answers: list[Snapshot] = []
        self.slices: list[Generator[None, None, None]] = []

    def feed(self, message: EventBatch | LoadUpdate) -> None:
        if isinstance(message, EventBatch):
            self.stream.feed_batch(message)
        else:
            self.stream.feed_load(message)


class Router:
    """One routing core, and the edge's part: links to the replicas it knows."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines
        self.known = {replica_id(engine.number) for engine in engines}
        self.restart()

    def restart(self) -> None:
        self.clock = FakeClock()
        self.routing = Routing(config(fingerprint=fingerprint(BLOCK_SIZE)), clock=self.clock)
        self.links: dict[ReplicaId, Link] = {}
        self.num_queries = 0
        self.follow()

    def follow(self) -> None:
        self.routing.update_replicas({name: info(fingerprint=fingerprint(BLOCK_SIZE)) for name in self.known})
        for name in self.links.keys() - self.known:
            del self.links[name]
        for name in self.known - self.links.keys():
            self.links[name] = Link(self.routing, name)

    def route(self, prompt: int) -> None:
        """Routing predicts: what is predicted must not disturb what is exact."""
        if self.known:
            self.num_queries += 1
            name = RequestId(f"q{self.num_queries}")
            try:
                self.routing.choose(RouteQuery(name, CHAINS[prompt], len(PROMPTS[prompt]) + 1))
            except AllBusy:  # an engine says that it runs as many requests as it has published batches
                return
            self.routing.release(name)

    def assert_closed(self) -> None:
        """A prefix of a prompt is held as far as the prompt is: whoever holds a block holds its parents."""
        for chain in CHAINS:
            hints = to_hints(chain)
            whole = self.routing._index.match(hints)
            for length in range(1, len(hints)):
                part = self.routing._index.match(hints[:length])
                assert part == {name: min(length, blocks) for name, blocks in whole.items()}


class World:
    """A few engines, a few routers, and what a schedule does to them."""

    def __init__(self, num_engines: int, num_routers: int) -> None:
        self.engines = [Engine(number) for number in range(num_engines)]
        self.routers = [Router(self.engines) for _ in range(num_routers)]

    def act(self, what: str, engine_number: int, router_number: int, value: int) -> None:
        engine = self.engines[engine_number % len(self.engines)]
        router = self.routers[router_number % len(self.routers)]
        link = router.links.get(replica_id(engine.number))
        match what:
            case "work":
                self.send(engine, engine.work(value % len(PROMPTS), 1 + value // len(PROMPTS)))
            case "update":
                self.send(engine, [engine.update()])
            case "restart engine":
                engine.restart()
            case "restart router":
                router.restart()
            case "leave" | "join":
                router.known ^= {replica_id(engine.number)}
                router.follow()
            case "route":
                router.route(value % len(PROMPTS))
            case "calm":  # a while in which nothing goes wrong
                for any_link in self.links():
                    if any_link.stream.needs_snapshot:
                        whole(any_link.stream.snapshot_slices(self.engine_of(any_link).snapshot()))
                    for message in take(any_link.on_the_way, 20):
                        any_link.feed(message)
            case _ if link is not None:
                self.happen(what, engine, link, value)
                self.assert_as_of(engine, router, link)
                if what in ("slice", "sync", "late"):
                    router.assert_closed()

    def links(self) -> list[Link]:
        return [link for router in self.routers for link in router.links.values()]

    def engine_of(self, link: Link) -> Engine:
        return next(engine for engine in self.engines if replica_id(engine.number) == link.replica)

    def assert_as_of(self, engine: Engine, router: Router, link: Link) -> None:
        """A live index is the engine's cache after the batch it applied last, never something in between."""
        if not link.stream.needs_snapshot:
            digest = router.routing._index.digest(replica_id(engine.number))
            assert digest == engine.digests[link.stream._epoch, link.stream._seq]

    def happen(self, what: str, engine: Engine, link: Link, value: int) -> None:
        """Something on one link."""
        if what == "deliver":
            for message in take(link.on_the_way, 1 + value % 6):
                link.feed(message)
        elif what in ("late", "repeat", "lose") and link.on_the_way:
            position = value % len(link.on_the_way)
            message = link.on_the_way[position] if what == "repeat" else link.on_the_way.pop(position)
            if what != "lose":
                link.feed(message)
        elif what == "ask" and link.stream.needs_snapshot:
            link.answers.append(engine.snapshot())
        elif what == "answer" and link.answers:
            answer = link.answers.pop(value % len(link.answers))
            link.slices.append(link.stream.snapshot_slices(answer))
        elif what == "slice" and link.slices:
            slices = link.slices[value % len(link.slices)]
            if next(slices, "over") == "over":
                link.slices.remove(slices)
        elif what == "sync" and link.stream.needs_snapshot:
            whole(link.stream.snapshot_slices(engine.snapshot()))
        elif what == "garbage":
            link.stream.feed_malformed()
        elif what == "doubt":
            link.stream.doubt()

    def send(self, engine: Engine, messages: list[EventBatch] | list[LoadUpdate]) -> None:
        for router in self.routers:
            link = router.links.get(replica_id(engine.number))
            if link is not None:
                link.on_the_way.extend(messages)

    def settle(self) -> None:
        """A few heartbeats, each answered with a snapshot where one is wanted: as the edge does."""
        for router in self.routers:
            router.known = {replica_id(engine.number) for engine in self.engines}
            router.follow()
        for _ in range(5):
            for engine in self.engines:
                beat = engine.flush()
                for router in self.routers:
                    link = router.links[replica_id(engine.number)]
                    link.stream.feed_batch(beat)
                    if link.stream.needs_snapshot:
                        whole(link.stream.snapshot_slices(engine.snapshot()))

    def assert_true(self) -> None:
        """Every router knows what every engine holds, and nothing else."""
        truth = {replica_id(engine.number): engine.cached for engine in self.engines}
        for router in self.routers:
            # No engine ever lied: whatever was lost or repeated was noticed before it was applied.
            assert "drift" not in router.routing.statistics().resyncs
            router.clock.advance(3600.0)  # predictions end
            router.routing._index.expire(router.clock())
            trie = router.routing._index
            for name, cached in truth.items():
                assert trie.digest(name) == digest_of(cached)
                assert not router.links[name].stream.needs_snapshot
            assert router.routing.statistics().index_entries == len(set().union(*truth.values()))
            for chain in CHAINS:
                hints = to_hints(chain)
                held = {name: leading(hints, cached) for name, cached in truth.items()}
                assert trie.match(hints) == {name: blocks for name, blocks in held.items() if blocks}


def leading(hints: list[HashHint], cached: set[HashHint]) -> int:
    return next((index for index, hint in enumerate(hints) if hint not in cached), len(hints))


def take(messages: list[EventBatch | LoadUpdate], number: int) -> list[EventBatch | LoadUpdate]:
    taken, messages[:] = messages[:number], messages[number:]
    return taken


# How often each happens. What starts a link anew is rare, or little would ever get through one.
WEIGHTS = {
    **{"work": 30, "deliver": 48, "sync": 20, "calm": 12, "ask": 8, "answer": 8, "slice": 16},
    **{"late": 6, "repeat": 6, "lose": 6, "update": 4, "route": 4, "garbage": 1, "doubt": 2},
    **{"restart engine": 2, "restart router": 1, "leave": 1, "join": 2},
}
ACTS = tuple(what for what, weight in WEIGHTS.items() for _ in range(weight))
SCHEDULES = st.lists(
    st.tuples(st.sampled_from(ACTS), st.integers(0, 1), st.integers(0, 1), st.integers(0, 59)),
    min_size=60,
    max_size=200,
)


def check(schedule: list[tuple[str, int, int, int]], num_engines: int, num_routers: int) -> None:
    with mock.patch.object(snapshot_slices, "SLICE_BLOCKS", 2):
        world = World(num_engines, num_routers)
        for act in schedule:
            world.act(*act)
        world.settle()
        world.assert_true()


@settings(max_examples=60)
@given(SCHEDULES, st.integers(1, 2), st.integers(1, 2))
def test_every_index_is_the_union_of_the_caches_after_any_schedule(
    schedule: list[tuple[str, int, int, int]], num_engines: int, num_routers: int
) -> None:
    check(schedule, num_engines, num_routers)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_schedules(hundred: int) -> None:
    """Drawn without Hypothesis, which takes as long to draw one as it takes to play it."""
    for seed in range(100 * hundred, 100 * hundred + 100):
        draw = random.Random(seed)
        schedule = [
            (draw.choice(ACTS), draw.randrange(2), draw.randrange(2), draw.randrange(60))
            for _ in range(draw.randint(60, 200))
        ]
        try:
            check(schedule, draw.randint(1, 2), draw.randint(1, 2))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_a_prompt_is_refused_where_everybody_says_to_be_full() -> None:
    """As engines of long schedules do; it ends no schedule."""
    engine = Engine(0)
    router = Router([engine])
    link = router.links[replica_id(0)]
    whole(link.stream.snapshot_slices(engine.snapshot()))
    max_running, max_waiting = (getattr(info(), limit) for limit in ("max_running", "max_waiting"))
    for _ in range(max_running + max_waiting):
        link.feed(engine.flush())
    with pytest.raises(AllBusy):
        router.routing.choose(RouteQuery(RequestId("one"), CHAINS[0], len(PROMPTS[0]) + 1))
    router.route(0)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 39), max_size=20))
def test_a_perfect_channel_needs_one_snapshot(work: list[int]) -> None:
    engine = Engine(0)
    router = Router([engine])
    link = router.links[replica_id(0)]
    whole(link.stream.snapshot_slices(engine.snapshot()))
    for value in work:
        for batch in engine.work(value % len(PROMPTS), 1 + value // len(PROMPTS)):
            link.feed(batch)
            assert router.routing._index.digest(replica_id(0)) == batch.digest
    assert router.routing.statistics().resyncs == {"join": 1}
    assert link.stream.counters.lost == link.stream.counters.repeated == 0
