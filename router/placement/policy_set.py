"""The policies that decide: the configured one, and those that single requests ask for by name.

Each is made when it is first asked for, told which replicas there are, and told everything from then on.
Knows policies by their names; knows neither requests nor costs. Owner: the router's event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cache.messages import ReplicaInfo
from cache.types import HashHint, ReplicaId, RequestId
from router.config import RouterConfig
from router.policies import Policy, PolicyContext, make_policy
from router.policies.expected_time import ExpectedTime


class PolicySet:
    def __init__(
        self, config: RouterConfig, context: PolicyContext, members: Mapping[ReplicaId, ReplicaInfo]
    ) -> None:
        """members: the replicas at any time. Raises ConfigError for an unknown policy or option."""
        self._config = config
        self._context = context
        self._members = members
        self._by_name: dict[str, Policy] = {}
        default = self.named(ExpectedTime.name)
        assert isinstance(default, ExpectedTime)
        self.expected_time = default  # whose charge and heat shape every request, whoever ranks
        self.configured = self.named(config.policy)

    def named(self, name: str) -> Policy:
        """Raises ConfigError for an unknown one."""
        policy = self._by_name.get(name)
        if policy is None:
            # The options belong to the configured policy; another one, asked for by name, has its defaults.
            options = self._config.policy_options if name == self._config.policy else {}
            policy = make_policy(name, options, context=self._context)
            for replica_id, info in self._members.items():
                policy.replica_added(replica_id, info)
            self._by_name[name] = policy
        return policy

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        for policy in self._by_name.values():
            policy.replica_added(replica_id, info)

    def replica_removed(self, replica_id: ReplicaId) -> None:
        for policy in self._by_name.values():
            policy.replica_removed(replica_id)

    def finished(self, request_id: RequestId, hints: Sequence[HashHint]) -> None:
        for policy in self._by_name.values():
            policy.finished(request_id, hints)
