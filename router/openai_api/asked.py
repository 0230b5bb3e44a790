"""What of a request to generate is not in its body: who asks, when, and what its headers want.

A value: knows neither HTTP nor bodies.
"""

from __future__ import annotations

from typing import NamedTuple

from router.placement.decision import Admittance
from router.tenants.allowance import Visit


class Asked(NamedTuple):
    request_id: str  # the client's, who may use it again
    visit: Visit  # whose request it is
    arrived_at: float  # when it was read, by the service's clock
    policy: str | None = None  # instead of the configured one
    session: str | None = None  # which of its client's requests belong together
    timeout_s: float | None = None  # after which its client wants it no more
    admittance: Admittance | None = None  # of all its prompts
