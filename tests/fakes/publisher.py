"""A publisher on this machine, of an engine that computes first come, first served."""

from __future__ import annotations

from typing import Any

from cache.scheduling_order import SchedulingOrder
from replica.publisher import Publisher


def a_publisher(**settings: Any) -> Publisher:
    engine = {"order": SchedulingOrder.FIRST_COME, "max_batched_tokens": 512}
    return Publisher(**{"host": "127.0.0.1", "port": 0, **engine, **settings})
