"""What a request's shape says of its prompt's hot prefix."""

from __future__ import annotations

import random

import pytest

from router.placement.hot_prefixes import STRIDE_TOKENS
from router.placement.shaper import Shaper
from router.policies import PolicyContext
from router.policies.base import alone
from router.policies.expected_time import ExpectedTime, ExpectedTimeOptions
from router.pricing.fleet_queue import FleetQueue
from tests.fakes.router import BLOCK_SIZE, FakeClock, hint_chain

STRIDE = STRIDE_TOKENS // BLOCK_SIZE
OPTIONS = ExpectedTimeOptions(hot_uses=4.0, hot_uses_per_queued=2.0)


@pytest.mark.parametrize(
    ("num_queued", "num_uses"), [(0, 4), (1, 6), (3, 10)], ids=["idle", "a queue", "a long queue"]
)
def test_the_hot_threshold_grows_with_the_queue(num_queued: int, num_uses: int) -> None:
    """Each copy costs time of a replica that others wait for, so it has to be used more often."""
    context = PolicyContext(BLOCK_SIZE, FakeClock(), random.Random(1))
    shaper = Shaper(BLOCK_SIZE, ExpectedTime(context, OPTIONS), alone)
    system = hint_chain("system", 4 * STRIDE)
    prompt = [*system, *hint_chain("new", STRIDE)]
    queue = FleetQueue(waiting=2.0 * num_queued, replicas=2.0)

    def is_hot() -> bool:
        """Nobody holds it, so the first copy would have all of its uses."""
        return shaper.shape(prompt, 5 * STRIDE_TOKENS + 1, [0, 0], queue, 0, now=0.0).hot_tokens > 0

    for number in range(num_uses):
        assert not is_hot(), number
        shaper.routed([*system, *hint_chain(f"user{number}", STRIDE)], 1000 + number, now=0.0)
    assert is_hot()
