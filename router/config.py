"""The Router's settings: frozen, checked when built, each default with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cache.errors import ConfigError
from cache.fingerprint import Fingerprint
from router.policies import check_policy


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Everything one Router needs to start."""

    model_name: str  # what clients send as `model`
    tokenizer: str  # folder or hub id; loaded without remote code
    fingerprint: Fingerprint  # this Router's own: it matches only replicas that carry the same
    tokenizer_revision: str | None = None
    policy: str = "expected_time"  # one of `router.policies.NAMES`
    policy_options: Mapping[str, object] = field(default_factory=dict)  # its knobs
    predicted_ttl_s: float = 5.0  # a routed prompt counts as cached this long, unless events confirm it
    reservation_ttl_s: float = 600.0  # a reservation nobody released is dropped after this
    silent_after_s: float = 5.0  # a replica without event or heartbeat this long is scored by load alone
    max_attempts: int = 3  # tries per request, each on another replica
    max_deaths: int = 2  # a request under which so many replicas died is refused, not retried
    max_body_bytes: int = 4 << 20
    max_stop_strings: int = 16
    max_stop_chars: int = 256
    expose_routing: bool = False  # x-warmpath-* response headers, and the x-warmpath-policy request header
    seed: int | None = None  # of the Router's random draws; None = from the system

    def __post_init__(self) -> None:
        check_policy(self.policy, self.policy_options)
        for name, low, high in (
            ("predicted_ttl_s", 0.0, 3600.0),
            ("reservation_ttl_s", 1.0, 86400.0),
            ("silent_after_s", 0.1, 3600.0),
            ("max_attempts", 1, 100),
            ("max_deaths", 1, 100),
            ("max_body_bytes", 1024, 1 << 30),
            ("max_stop_strings", 1, 10_000),
            ("max_stop_chars", 1, 1 << 20),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(name, value, f"must be between {low} and {high}")
