"""How long the queues have been lately."""

from __future__ import annotations

import math

import pytest

from router.pricing.queue_average import QueueAverage


def test_the_queue_average_follows_with_its_time_constant() -> None:
    average = QueueAverage(time_constant_s=5.0)
    assert average.update(0.0, now=0.0) == 0.0
    assert average.update(8.0, now=5.0) == pytest.approx(8.0 * (1 - math.exp(-1)))
    assert average.update(8.0, now=1000.0) == pytest.approx(8.0)
