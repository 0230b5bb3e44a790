"""Laws of every policy as `Routing` uses it: whatever happens to the fleet, the choice can be made."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.types import ReplicaId
from router.errors import AllBusy
from router.placement.routing import Routing
from router.policies import NAMES
from tests.fakes.policies import FakePrompt, contents
from tests.fakes.router import FakeClock, chain, config, info, load, query


class Story:
    """A fleet that changes while requests come and go, some retried, some with text, some with a session."""

    def __init__(self, name: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        self.routing = Routing(config(policy=name), clock=self.clock, rng=random.Random(seed))
        self.fleet: set[ReplicaId] = set()
        self.draining: set[ReplicaId] = set()
        self.num_ever = 0
        self.in_flight: dict[str, frozenset[ReplicaId]] = {}
        self.num_requests = 0
        self.num_placed = 0

    def step(self) -> None:
        self.clock.advance(self.rng.random() * 2)
        if not self.fleet:
            return self.join()
        steps = [self.ask, self.ask, self.ask, self.retry, self.finish, self.report, self.join, self.leave]
        return self.rng.choices(steps, (6, 6, 6, 2, 9, 4, 1, 1))[0]()

    def join(self) -> None:
        self.num_ever += 1
        self.fleet.add(ReplicaId(f"replica{self.num_ever}"))
        self.tell()

    def leave(self) -> None:
        self.fleet.discard(self.rng.choice(sorted(self.fleet)))
        self.draining &= self.fleet
        self.tell()

    def tell(self) -> None:
        self.routing.update_replicas(
            {name: info(num_blocks=self.rng.choice((20, 500))) for name in self.fleet}
        )

    def report(self) -> None:
        name = self.rng.choice(sorted(self.fleet))
        is_draining = self.rng.random() < 0.1
        (self.draining.add if is_draining else self.draining.discard)(name)
        running = self.rng.randrange(20)
        step_time = {} if self.rng.random() < 0.8 else {"step_time": None}
        self.routing.on_load(
            name, load(num_running=running, num_waiting=running // 3, is_draining=is_draining, **step_time)
        )

    def ask(self) -> None:
        self.num_requests += 1
        self.place(f"request{self.num_requests}", frozenset())

    def retry(self) -> None:
        if self.in_flight:
            name, excluded = self.rng.choice(sorted(self.in_flight.items()))
            self.place(name, excluded | {self.rng.choice(sorted(self.fleet))})

    def place(self, name: str, excluded: frozenset[ReplicaId]) -> None:
        open_ = self.fleet - self.draining - excluded
        if not open_:
            return
        parent = chain(f"doc{self.rng.randrange(4)}", self.rng.randrange(6))
        tail = self.rng.choice((0, 0, 3))
        hashes = chain(f"{name}/own", tail, parent)
        text = "".join(self.rng.choices("ab", k=self.rng.randrange(60))) if self.rng.random() < 0.5 else ""
        prompt = FakePrompt(text, self.rng.choice((None, "s1", "s2")))
        asked = query(
            name,
            block_hashes=hashes,
            num_prompt_tokens=16 * len(hashes) + self.rng.randrange(1, 16),
            excluded=excluded,
            prompt=self.rng.choice((None, prompt)),
        )
        try:
            placement = self.routing.choose(asked)
        except AllBusy:
            return
        assert len(set(placement.ranks)) == len(placement.ranks)
        assert set(placement.ranks) <= open_
        self.in_flight[name] = excluded
        self.num_placed += 1
        accepted_by = placement.ranks[min(self.rng.randrange(4), len(placement.ranks) - 1)]
        self.routing.routed(placement.request_id, accepted_by)

    def finish(self) -> None:
        if self.in_flight:
            name = self.rng.choice(sorted(self.in_flight))
            del self.in_flight[name]
            self.routing.finish(query(name).request_id, block_hashes=chain(name, 3))


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_the_choice_can_be_made_and_who_left_is_forgotten(name: str, seed: int) -> None:
    story = Story(name, seed)
    for _ in range(120):
        story.step()
    assert story.num_placed > 15
    remembered = contents(story.routing._policies.named(name))
    gone = {f"replica{number}" for number in range(1, story.num_ever + 1)} - story.fleet
    assert not gone & set(remembered)
