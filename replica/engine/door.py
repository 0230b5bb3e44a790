"""Where the engine says who has come, before its thread, which may be inside a step, has looked."""

from __future__ import annotations

from typing import Protocol

from cache.types import RequestId
from replica.engine.arrivals import Arrival


class Door(Protocol):
    """Hears of requests before the engine thread does. Any thread; never blocks."""

    def arrived(self, arrival: Arrival) -> None:
        """It is about to be posted; a batch will name it, or `refused` is called."""

    def refused(self, request_id: RequestId) -> None:
        """It will not be served."""

    def draining(self) -> None:
        """No new requests are wanted; a batch will say so, too."""
