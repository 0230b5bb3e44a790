"""What a request meets is the same in C as in Python, to the last bit, whatever is queued where."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from cache.block_hash import hint_view
from cache.events import QueuedPrompts, StepTimeModel
from cache.scheduling_order import SchedulingOrder
from cache.types import ReplicaId, RequestId
from router.placement.decision import RouteQuery
from router.placement.passing import Passing
from router.placement.replica_queue import Sent
from router.placement.replica_queues import ReplicaQueues
from router.pricing.cost import Price
from router.pricing.replica_state import ReplicaState
from tests.fakes.router import BLOCK_SIZE, STEP_TIME, chain, info, load, query, replica_id
from tests.property.test_routing_cost import MODELS

compiled = pytest.importorskip(
    "router.native.passing", reason="not compiled: no C compiler at the installation"
)

NOW = 1000.0
BLOCKS = 12
CHAINS = [hint_view(chain("asked", BLOCKS)), hint_view(chain("asked", 3)), hint_view(chain("another", 5)), ()]
# Sums of halves and quarters, in which places are often equal.
EXACT = StepTimeModel(base_s=0.25, per_token_s=0.0, per_attention_s=0.0, per_sequence_s=0.0)
SCALED = StepTimeModel(base_s=0.5, per_token_s=0.0, per_attention_s=0.0, per_sequence_s=0.0)

PRICE = Price(NOW, STEP_TIME, 0.01, 256, 0.02, -math.inf, 0.1, STEP_TIME)
STATE = ReplicaState(
    replica_id(0), PRICE, math.inf, False, 1, 1, 0, 0, 64, 0.5, NOW + 9.0, NOW, 1.0, STEP_TIME, load(), info()
)


class Fleet:
    """Replicas of a few kinds, what waits at each, and what each holds of the prompt."""

    def __init__(self, seed: int, num_replicas: int, kinds: Sequence[StepTimeModel]) -> None:
        self.rng, self.kinds = random.Random(seed), kinds
        is_there = self.rng.random() < 0.5
        self.queues = ReplicaQueues(BLOCK_SIZE, lambda *_: is_there)
        self.states = [self._replica(replica_id(index)) for index in range(num_replicas)]
        self.cached = [self.rng.choice([0, 0, 3, 4, BLOCKS]) * BLOCK_SIZE for _ in self.states]

    def query(self) -> RouteQuery:
        rng = self.rng
        return query("asked", BLOCKS)._replace(
            tenant=self._tenant(),
            share=self._share(),
            priority=rng.choice([0, 0, -1, 1]),
            asked_at=rng.choice([None, None, NOW - 20.0]),
        )

    def _replica(self, name: ReplicaId) -> ReplicaState:
        rng, preempting = self.rng, SchedulingOrder.SHORTEST_PREEMPTING
        about = info(scheduling_order=rng.choice([preempting] * 4 + [SchedulingOrder.FIRST_COME]))
        self.queues.replica_added(name, about)
        accounts = tuple([self._account(tenant) for tenant in {self._tenant(), self._tenant()}])
        self.queues.said(name, load(queued=rng.choice([accounts, ()])), NOW - rng.choice([0.0, 0.02, 5.0]))
        for number in range(rng.choice([0, 0, 1, 2])):
            self.queues._enter(RequestId(f"{name}/{number}"), self._sent(name), NOW)
        room = rng.choice([64, 512])
        price = Price(0.0, rng.choice(self.kinds), 0.1, room, 0.2, -math.inf, 0.3, self.kinds[0])
        return STATE._replace(
            replica_id=name,
            price=rng.choice([price] * 9 + [None]),
            num_requests=about.max_running - rng.choice([0, 1, 2, 2, 2]),
            queued_tokens=rng.choice([0, 64, 5_000]),
            busy_until=NOW + rng.choice([-1.0, 0.0, 0.25, 30.0, 30.0]),
            first_at=NOW + rng.choice([-math.inf, -math.inf, -1.0, 0.2, 100.0]),
            info=about,
        )

    def _account(self, tenant: str) -> QueuedPrompts:
        """Places of some, and of some only how much they are."""
        rng = self.rng
        places = sorted([self._behind_now() for _ in range(rng.randrange(5))])
        tokens = [self._tokens() for _ in places]
        num_more = rng.choice([0, 3])
        more = self._tokens() if num_more else 0
        had = rng.choice([0.0, 1e3, 1e6])
        return QueuedPrompts(tenant, self._share(), had, tuple(places), tuple(tokens), num_more, more)

    def _sent(self, name: ReplicaId) -> Sent:
        lag, place = self.rng.choice([0.0, 1.0]), 0.1 * NOW + self._behind_now()
        return Sent(name, self._tenant(), self._share(), self._tokens(), place, lag, self.rng.choice(CHAINS))

    def _tenant(self) -> str:
        return self.rng.choice(["", "", "a", "b"])

    def _share(self) -> float:
        return self.rng.choice([0.01, 0.5, 1.0, 100.0])

    def _tokens(self) -> int:
        return self.rng.choice([0, 50, 200, 50_000])

    def _behind_now(self) -> float:
        return self.rng.choice([-2.0, 0.25, 0.5, 0.75, 1.0, self.rng.uniform(0.0, 2.0), 20.0])


@given(st.integers(0, 2**32), st.integers(0, 200), st.lists(MODELS, max_size=2))
def test_the_same_is_met(seed: int, num_replicas: int, kinds: list[StepTimeModel]) -> None:
    fleet = Fleet(seed, num_replicas, [EXACT, SCALED, *kinds])
    states, request = fleet.states, fleet.query()
    passing, asked = Passing(fleet.queues), (request, CHAINS[0], states, fleet.cached, NOW)
    expected, found = passing.interpreted(*asked), passing.met_by(*asked)
    assert found == expected
    assert {type(state) for state in found} <= {ReplicaState}
    are_left = [one is state for one, state in zip(found, states, strict=True)]
    assert are_left == [one is state for one, state in zip(expected, states, strict=True)]
    passed = [state.price.passed_s for state in found if state.price is not None]
    event(f"passes some: {any(passed)}, leaves some as they are: {any(are_left)}, all: {all(are_left)}")


# --- what is no state ----------------------------------------------------------------------------


class Asked:
    """One replica, at which somebody waits, and what is asked of it."""

    def __init__(self) -> None:
        self.queues = ReplicaQueues(BLOCK_SIZE, lambda *_: False)
        self.queues.replica_added(
            STATE.replica_id, info(scheduling_order=SchedulingOrder.SHORTEST_PREEMPTING)
        )
        self.send(hints=CHAINS[0])
        self.hints = CHAINS[0]
        self.arguments: dict[str, Any] = {
            "states": [STATE],
            "cached": [BLOCK_SIZE],
            "passable": self.queues.passable,
            "hints": CHAINS[0],
            "tenant": "",
            "share": 1.0,
            "num_prompt_tokens": BLOCKS * BLOCK_SIZE + 1,
            "block_size": BLOCK_SIZE,
            "now": NOW,
            "own": lambda queue, price, held: (0.5, 7.0),
            "promised_place": lambda name, held: -math.inf,
        }

    def send(self, **changes: Any) -> None:
        sent = Sent(STATE.replica_id, "", 1.0, 64, 9.0, 0.0, ())._replace(**changes)
        self.queues._enter(RequestId(f"sent-{len(self.queues)}"), sent, NOW)

    def met(self, **changes: Any) -> list[ReplicaState]:
        found: list[ReplicaState] = compiled.met_by(*{**self.arguments, **changes}.values())
        return found


def fails(*_: object) -> tuple[float, float]:
    raise RuntimeError("asked")


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"cached": []}, ValueError, "1 states and 0 cached"),
        ({"cached": [-1]}, OverflowError, "-1 tokens: needs 0 to"),
        ({"num_prompt_tokens": 2**31}, OverflowError, "2147483648 tokens: needs 0 to 2147483647"),
        ({"block_size": 0}, ZeroDivisionError, "block_size = 0: needs 1 token"),
        ({"states": [None]}, TypeError, "a state is a tuple of 16"),
        ({"states": [STATE[:5]]}, TypeError, "a state is a tuple of 16"),
        ({"states": [STATE._replace(price=PRICE[:5])]}, TypeError, "a price is a tuple of 12"),
        ({"states": [STATE._replace(price=PRICE._replace(room=0))]}, ZeroDivisionError, "room = 0: needs 1"),
        ({"states": [STATE._replace(info=None)]}, AttributeError, "max_running"),
        ({"states": [STATE._replace(first_at=None)]}, TypeError, "must be real number"),
        ({"states": None}, TypeError, "not iterable"),
        ({"hints": ()}, IndexError, "out of range"),
        ({"own": fails}, RuntimeError, "asked"),
        ({"own": lambda *_: (0.5,)}, TypeError, "2 arguments"),
        ({"promised_place": fails}, RuntimeError, "asked"),
        ({"passable": {STATE.replica_id: None}}, AttributeError, "lines"),
    ],
)
def test_what_is_no_state_is_an_error_and_nothing_is_kept(
    changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    asked = Asked()
    before = sys.getrefcount(STATE), sys.getrefcount(PRICE)
    for _ in range(3):
        with pytest.raises(error, match=says):
            asked.met(**changes)
    assert (sys.getrefcount(STATE), sys.getrefcount(PRICE)) == before


@pytest.mark.parametrize("field", ["places", "sizes", "told", "told_at", "had", "tokens", "last", "share"])
def test_what_is_no_line_is_an_error_and_nothing_is_kept(field: str) -> None:
    asked = Asked()
    asked.send(place=20.0)
    asked.send(tenant="another")
    asked.queues.passable[STATE.replica_id].told({"": QueuedPrompts("", 1.0, 0.0, (9.0,), (64,))}, NOW)
    lines = asked.queues.passable[STATE.replica_id].lines
    if field == "last":
        del lines["another"]  # places alone tell whose turn it is
    line, nothing = lines["another" if field == "share" else ""], object()
    setattr(line, field, [nothing, nothing] if field in ("places", "sizes") else nothing)
    before = sys.getrefcount(STATE), sys.getrefcount(nothing)
    for _ in range(3):
        with pytest.raises((TypeError, AttributeError)):
            asked.met(hints=CHAINS[2], own=lambda *_: (0.5, 30.0 if field == "sizes" else 7.0))
    assert (sys.getrefcount(STATE), sys.getrefcount(nothing)) == before


def test_nothing_is_kept_of_what_is_met() -> None:
    """Neither of values that were there before, nor of those that are made on the way."""
    asked, hints = Asked(), hint_view(chain("asked", 30))
    asked.send(hints=hints, tenant="another")
    queue = asked.queues.passable[STATE.replica_id]
    account = QueuedPrompts("", 1.0, 1000.5, (2000.5,), (3000,), 4000, 5000)
    queue.told({"": account}, NOW)
    line = queue.lines[""]
    of_line = [line, line.places, line.sizes, line.had, line.told, account.places, account.tokens]
    of_queue = [queue, queue.lines, queue.sent, *queue.sent.values()]
    held = [STATE, PRICE, STATE.info, STEP_TIME, *of_queue, *of_line]

    def met(place: float) -> None:
        asked.met(
            cached=[BLOCK_SIZE * 30],
            num_prompt_tokens=30 * BLOCK_SIZE + 1,
            hints=hints,
            own=lambda *_: (place - 1.0, place - 2.0),
            promised_place=lambda *_: place + 1.0,
        )

    for place in (8.0, 9.0, 3000.0):
        met(place)
        counts, blocks = [sys.getrefcount(each) for each in held], sys.getallocatedblocks()
        for _ in range(1_000):
            met(place)
        assert [sys.getrefcount(each) for each in held] == counts
        assert sys.getallocatedblocks() - blocks < 500


def test_what_has_the_same_place_is_before_it() -> None:
    """It came later: so it is told, and so what was sent has it."""
    asked = Asked()
    asked.send(place=20.0)
    (met,) = asked.met(own=lambda *_: (0.5, 9.0), hints=CHAINS[2])
    assert met.price is not None
    assert met.price.passed_s == 0.5
    assert met.price.busy_until == NOW + 4.5, "one of two that are equally long"
    assert asked.met(own=lambda *_: (0.5, 20.0), hints=CHAINS[2]) == [STATE]


def test_whoever_is_alike_is_asked_of_once() -> None:
    """And of more kinds than are remembered the results are each one's own."""
    asked, calls = Asked(), list[int]()

    def own(queue: object, price: Price, held: int) -> tuple[float, float]:
        calls.append(held)
        return float(held), 7.0

    kinds = [BLOCK_SIZE * (kind % 10) for kind in range(40)]
    for cached, most in (([BLOCK_SIZE] * 40, 1), (kinds[:8] * 5, 8), (kinds, 40)):
        calls.clear()
        met = asked.met(states=[STATE] * 40, cached=cached, own=own)
        assert [state.price.passed_s for state in met if state.price is not None] == [
            float(c) for c in cached
        ]
        assert len(calls) == most
