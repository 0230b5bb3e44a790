"""The border to a replica: what sends it an attempt. Knows neither HTTP nor Ray."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from cache.messages import Delta, GenerateRequest


class ReplicaCalls(Protocol):
    """Sends one attempt to a replica; which one is up to the ranks it carries."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """The attempt's deltas. Closing it early cancels the generation.

        Raises ReplicaLost, a RequestRefused from the replica, or a RoutingError if nobody took it.
        """
