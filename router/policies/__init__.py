"""Routing policies by name: what `policy:` and `policy_options:` in deploy.yaml may say."""

from __future__ import annotations

from collections.abc import Mapping

from cache.errors import ConfigError
from router.policies.aibrix_preble import AibrixPreble
from router.policies.aibrix_prefix import AibrixPrefix
from router.policies.base import (
    Heir,
    Policy,
    PolicyContext,
    PolicyRequest,
    PromptView,
    Scored,
    StatelessPolicy,
)
from router.policies.chwbl import Chwbl
from router.policies.dynamo_kv import DynamoKv
from router.policies.expected_time import ExpectedTime
from router.policies.gie_epp import GieEpp
from router.policies.least_outstanding import LeastOutstanding
from router.policies.llmd_precise import LlmdPrecise
from router.policies.lmetric import Lmetric
from router.policies.mooncake_min_ttft import MooncakeMinTtft
from router.policies.options import PolicySpec, read_options
from router.policies.power_of_two import PowerOfTwo
from router.policies.preble import Preble
from router.policies.prodstack_kv_aware import ProdstackKvAware
from router.policies.prodstack_prefix import ProdstackPrefix
from router.policies.prodstack_simhash import ProdstackSimhash
from router.policies.random_choice import RandomChoice
from router.policies.ray_kv_aware import RayKvAware
from router.policies.ray_prefix_affinity import RayPrefixAffinity
from router.policies.round_robin import RoundRobin
from router.policies.session_affinity import SessionAffinity
from router.policies.sglang_cache_aware import SglangCacheAware

POLICIES: Mapping[str, PolicySpec] = {
    spec.name: spec
    for spec in (
        PolicySpec(ExpectedTime, ExpectedTime.Options),
        PolicySpec(RoundRobin),
        PolicySpec(RandomChoice),
        PolicySpec(LeastOutstanding),
        PolicySpec(PowerOfTwo),
        PolicySpec(SessionAffinity, SessionAffinity.Options),
        PolicySpec(Chwbl, Chwbl.Options),
        PolicySpec(SglangCacheAware, SglangCacheAware.Options),
        PolicySpec(ProdstackPrefix, ProdstackPrefix.Options),
        PolicySpec(ProdstackSimhash, ProdstackSimhash.Options),
        PolicySpec(ProdstackKvAware, ProdstackKvAware.Options),
        PolicySpec(AibrixPrefix, AibrixPrefix.Options),
        PolicySpec(AibrixPreble, AibrixPreble.Options),
        PolicySpec(GieEpp, GieEpp.Options),
        PolicySpec(LlmdPrecise, LlmdPrecise.Options),
        PolicySpec(DynamoKv, DynamoKv.Options),
        PolicySpec(RayKvAware, RayKvAware.Options),
        PolicySpec(RayPrefixAffinity, RayPrefixAffinity.Options),
        PolicySpec(Preble, Preble.Options),
        PolicySpec(MooncakeMinTtft),
        PolicySpec(Lmetric, Lmetric.Options),
    )
}
NAMES = tuple(POLICIES)

__all__ = [
    "NAMES",
    "POLICIES",
    "Heir",
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
