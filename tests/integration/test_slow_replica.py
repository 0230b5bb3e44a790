"""One of three replicas becomes ten times slower, at 60 % of what is left, for good or for a while: in
virtual time, so exactly.

The real routing over real engines on the simulated runner. What tells is each engine's own measurement of its
steps, and requests that are answered late.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from cache.types import ReplicaId
from replica.config import SimConfig
from router.placement.observer import RoutingObserver
from tests.fakes.fleet import Fleet

SIM = SimConfig(base_s=0.02, per_token_s=0.0002, per_attention_s=0.0, per_sequence_s=0.001)
FACTOR = 10.0
RATE_PER_S = 80.0  # 60 % of what two replicas answer
SLOW_AT_S, SETTLED_S, END_S = 15.0, 5.0, 32.0
WELL_AT_S, TRIED_S, LATER_S = 22.0, 15.0, 45.0
HEARTBEAT_S = 0.5
VICTIM = ReplicaId("r0")


@dataclass
class Run:
    """When each request was sent, had its first token, and where it went."""

    sent: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)

    def p99(self, begin_s: float, end_s: float) -> float:
        waits = sorted(self.first[name] - at for name, at in self.sent.items() if begin_s <= at < end_s)
        return waits[int(0.99 * len(waits))]


class Watcher:
    def __init__(self, fleet: Fleet, run: Run) -> None:
        self._fleet, self._run = fleet, run

    def decided(self, record: Any, _query: Any, _hints: Any) -> None:
        self._run.where[record.request_id] = record.replica_id

    def first_token(self, request_id: Any, _replica_id: Any, _cached_tokens: int) -> None:
        self._run.first.setdefault(request_id, self._fleet.now)

    def __getattr__(self, name: str) -> Any:
        if name in RoutingObserver.__dict__:
            return lambda *_: None
        raise AttributeError(name)


def serve(end_s: float, rate_per_s: float, *, well_at_s: float | None = None) -> Run:
    fleet, found, draw = Fleet(3, num_blocks=2048, sim=SIM), Run(), random.Random(1)
    fleet.routing.watch(Watcher(fleet, found))  # type: ignore[arg-type]
    prefixes = [[draw.randrange(1000) for _ in range(128)] for _ in range(24)]
    for replica in fleet.replicas.values():
        fleet.measure_steps(replica.replica_id)
        fleet.beat(replica.replica_id, HEARTBEAT_S, end_s)
    fleet.at(SLOW_AT_S, lambda: fleet.slow_down(VICTIM, FACTOR))
    if well_at_s is not None:
        fleet.at(well_at_s, lambda: fleet.slow_down(VICTIM, 1.0))
    at_s = 0.0
    while at_s < end_s:
        at_s += draw.expovariate(rate_per_s)
        name = f"q{len(found.sent)}"
        found.sent[name] = at_s
        tail = [draw.randrange(1000) for _ in range(8)]
        fleet.send(at_s, name, draw.choice(prefixes) + tail, max_tokens=12)
    fleet.run()
    return found


@pytest.fixture(scope="module")
def run() -> Run:
    return serve(END_S, RATE_PER_S)


def test_the_fleets_tail_at_most_doubles(run: Run) -> None:
    healthy, slow = run.p99(5.0, SLOW_AT_S), run.p99(SLOW_AT_S + SETTLED_S, END_S)
    assert slow <= 2.0 * healthy, (healthy, slow)


def test_the_slow_one_is_left_alone_once_it_is_known(run: Run) -> None:
    late = [name for name, at in run.sent.items() if at >= SLOW_AT_S + SETTLED_S]
    assert sum(run.where[name] == VICTIM for name in late) <= 0.01 * len(late)
    healthy = [name for name, at in run.sent.items() if at < SLOW_AT_S]
    assert sum(run.where[name] == VICTIM for name in healthy) > 0.2 * len(healthy)


def test_one_that_was_slow_for_a_while_is_found_quick_again() -> None:
    """It measured itself while others had its cores, and nobody goes to who is ten times slower."""
    found = serve(LATER_S, RATE_PER_S / 2, well_at_s=WELL_AT_S)
    slow = [name for name, at in found.sent.items() if SLOW_AT_S + SETTLED_S / 2 <= at < WELL_AT_S]
    late = [name for name, at in found.sent.items() if at >= WELL_AT_S + TRIED_S]
    assert sum(found.where[name] == VICTIM for name in slow) <= 0.01 * len(slow)
    assert sum(found.where[name] == VICTIM for name in late) > 0.2 * len(late)
