"""Routing policies by name: what `policy:` and `policy_options:` in deploy.yaml may say."""

from __future__ import annotations

from collections.abc import Mapping

from cache.errors import ConfigError
from router.policies.base import (
    Policy,
    PolicyContext,
    PolicyRequest,
    PromptView,
    Scored,
    StatelessPolicy,
)
from router.policies.expected_time import ExpectedTime
from router.policies.options import PolicySpec, read_options
from router.policies.round_robin import RoundRobin

POLICIES: Mapping[str, PolicySpec] = {
    spec.name: spec
    for spec in (
        PolicySpec(ExpectedTime, ExpectedTime.Options),
        PolicySpec(RoundRobin),
    )
}
NAMES = tuple(POLICIES)

__all__ = [
    "NAMES",
    "POLICIES",
    "Policy",
    "PolicyContext",
    "PolicyRequest",
    "PolicySpec",
    "PromptView",
    "Scored",
    "StatelessPolicy",
    "check_policy",
    "make_policy",
]


def check_policy(name: str, options: Mapping[str, object]) -> None:
    """Raises ConfigError naming the known policies, or the known options and their range."""
    read_options(_spec(name), options)


def make_policy(name: str, options: Mapping[str, object] | None = None, *, context: PolicyContext) -> Policy:
    """The policy of that name. Raises ConfigError as `check_policy` does."""
    spec = _spec(name)
    return spec.build(context, read_options(spec, options or {}))


def _spec(name: str) -> PolicySpec:
    try:
        return POLICIES[name]
    except KeyError:
        raise ConfigError("policy", name, "must be one of " + ", ".join(POLICIES)) from None
