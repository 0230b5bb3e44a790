"""Exploit what is cached if that is most of the prompt; else explore where the last minutes' work is least.

Source: Preble 8e7906a (2024-05-24; Srivatsa et al., ICLR 2025), "E2" of its global scheduler: a radix tree
of tokens with the replicas each node is allocated to.
    cached > new tokens  ->  replicas of the matched node, of several the least cost
    otherwise            ->  all replicas, the least cost
    cost = sum over its nodes of the last 3 minutes of miss rate * requests * prefill time / replicas
         + active requests * 45 tokens to decode * median time per token
         + what computing again would cost of the nodes that the new tokens would evict (least recently used)
Requests count at the nearest node longer than what precedes it. If the most costly replica has more than
1.5 times the least (after 50 requests per replica), nodes move from the one to the other.
Its server and its paper's configurations switch the eviction term on, though the class has it off.
Different here: each engine's own fit stands for the profile of its GPU (Mistral-7B on an A6000 until there is
one; 0.15 s per token to decode); replicas keep what their caches hold (198,516 tokens there), and leave a
node when it is evicted rather than when its window ends; a request is taken to decode 45 tokens, which there
is so only where its client sets no limit (with 343, the mean of the Mooncake conversation trace, it is
slower); nodes are moved every 10 s (an interval its source has, commented out) instead of at every request,
with which it is sooner on 16 replicas and in overload, and later, by 6 %, on four at load 0.85. The cheapest
of a matched set is taken, where its source mistakes the place in the set for the replica. All of this is
meant to favour it.
Not represented: the copy of a hot node when its times to first token double within the window, which a
policy is not told; that a request three nodes or more below its important one moves nothing. Blocks of the
engine stand for tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.events import StepTimeModel
from cache.messages import ReplicaInfo
from cache.types import ReplicaId
from router.policies.base import PolicyContext, PolicyRequest, Scored
from router.policies.indexes.prefix_window import NodeUse, PrefixWindow
from router.policies.indexes.prompt_tree import PromptTree
from router.policies.indexes.radix_tree import RadixNode, nearest_owners
from router.policies.options import check_range
from router.policies.profiled_prefill import A6000_MISTRAL_7B
from router.policies.ranking import by_cost
from router.policies.stateful import StatefulPolicy
from router.pricing.cost import Candidate

DECODE_TOKEN_S = 0.15  # until an engine has measured itself


@dataclass(frozen=True, slots=True)
class PrebleOptions:
    window_s: float = 180.0
    decode_tokens: int = 45  # expected of every request
    enable_eviction: bool = True  # price what a new prompt pushes out
    enable_rebalancing: bool = True
    high_load_threshold: float = 1.5  # the most costly replica over the least
    min_requests_per_replica: int = 50  # before anything is moved
    rebalancing_interval_s: float = 10.0

    def __post_init__(self) -> None:
        check_range(
            self,
            window_s=(1.0, 1e6),
            decode_tokens=(0, 1_000_000),
            high_load_threshold=(1.0, 1e6),
            min_requests_per_replica=(0, 1_000_000),
            rebalancing_interval_s=(0.0, 1e6),
        )


class Preble(StatefulPolicy):
    name = "preble"
    uses_prefix = True
    Options = PrebleOptions

    def __init__(self, context: PolicyContext, options: PrebleOptions) -> None:
        self._options = options
        self._block_size = context.block_size
        self._clock = context.clock
        self._tree = _PrebleTree(window_s=options.window_s, prefill_s=self._prefill_s)
        self._prompts = PromptTree(self._tree, context.block_size)
        self._step_time: StepTimeModel | None = None  # of the fleet, for prefill times
        self._max_batched_tokens = 1
        self._decode_s: dict[ReplicaId, float] = {}  # of each replica's requests, as last seen
        self._num_routed = 0
        self._rebalanced_at = context.clock()

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        self._tree.expire(self._clock())
        self._follow_speed(candidates)
        leaf = self._prompts.find(request)
        costs = [self._cost_s(candidate, leaf.new_tokens) for candidate in candidates]
        ranked = by_cost(candidates, costs)
        if leaf.new_tokens < leaf.known_tokens:
            allocated = nearest_owners(leaf.match.node, {candidate.replica_id for candidate in candidates})
            ranked.sort(key=lambda scored: scored.replica_id not in allocated)
        return ranked

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self._decode_s[replica_id] = 0.0
        self._tree.add_owner(replica_id, info.num_blocks * self._block_size)

    def replica_removed(self, replica_id: ReplicaId) -> None:
        self._decode_s.pop(replica_id, None)
        self._tree.remove_owner(replica_id)

    def routed(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        now = self._clock()
        leaf = self._prompts.send(request, replica_id)
        self._tree.count(_important(leaf), leaf.end_chars, leaf.chars_before, now)
        self._num_routed += 1
        if self._is_rebalancing_due(now):
            self._rebalanced_at = now
            self._rebalance()

    # --- cost ---------------------------------------------------------------------------------

    def _cost_s(self, candidate: Candidate, new_tokens: int) -> float:
        decode_s = candidate.load.num_requests * self._options.decode_tokens * _decode_token_s(candidate)
        if candidate.replica_id in self._decode_s:
            self._decode_s[candidate.replica_id] = decode_s
        cost_s = self._tree.owner_use(candidate.replica_id).work_s + decode_s
        return cost_s + self._eviction_s(candidate.replica_id, new_tokens)

    def _eviction_s(self, replica_id: ReplicaId, new_tokens: int) -> float:
        """What its oldest nodes, as large as the new tokens together, would cost to compute again.

        As in the source, the cache is taken to be full.
        """
        if not self._options.enable_eviction:
            return 0.0
        lost_s, evicted_tokens = 0.0, 0
        for node in self._tree.oldest(replica_id):
            if evicted_tokens >= new_tokens:
                break
            evicted_tokens += node.num_chars
            if _is_large(node):
                lost_s += self._tree.recompute_s(node)
        return lost_s

    def _prefill_s(self, num_tokens: int, context_tokens: int) -> float:
        model = self._step_time
        if model is None:
            return A6000_MISTRAL_7B.seconds(num_tokens, context_tokens)
        return model.prefill_s(num_tokens, context_tokens - num_tokens, self._max_batched_tokens)

    def _follow_speed(self, candidates: Sequence[Candidate]) -> None:
        measured = next((c.load for c in candidates if c.load.step_time is not None), None)
        if measured is not None:
            self._step_time, self._max_batched_tokens = measured.step_time, measured.max_batched_tokens

    # --- moving nodes -------------------------------------------------------------------------

    def _is_rebalancing_due(self, now: float) -> bool:
        options = self._options
        return (
            options.enable_rebalancing
            and now - self._rebalanced_at >= options.rebalancing_interval_s
            and self._num_routed >= options.min_requests_per_replica * len(self._decode_s)
        )

    def _rebalance(self) -> None:
        """From the most costly replica to the least, then from the second, until they are near enough."""
        used_twice = [use for use in self._tree.uses() if use.num_requests > 1]
        costs_s = dict(self._decode_s)
        movable: dict[ReplicaId, list[NodeUse]] = {replica_id: [] for replica_id in costs_s}
        for use in used_twice:
            for replica_id in use.bearers:
                costs_s[replica_id] += use.share_s
                if _is_large(use.node):
                    movable[replica_id].append(use)
        by_cost_s = sorted(costs_s, key=costs_s.__getitem__, reverse=True)
        light = by_cost_s[-1]
        for heavy in by_cost_s[:-1]:
            if costs_s[heavy] < self._options.high_load_threshold * costs_s[light]:
                break
            if len(movable[heavy]) > 1:  # one alone is copied if it is hot, which is not known here
                self._steal(movable[heavy], heavy, light, costs_s)

    def _steal(
        self, uses: list[NodeUse], heavy: ReplicaId, light: ReplicaId, costs_s: dict[ReplicaId, float]
    ) -> None:
        """Cheapest nodes first, while that makes the two more equal."""
        for use in sorted(uses, key=lambda use: use.share_s):
            share_s = use.share_s
            if heavy not in use.bearers or costs_s[heavy] - share_s < costs_s[light] + share_s:
                break
            costs_s[heavy] -= share_s
            costs_s[light] += share_s
            self._tree.reassign(use.node, light)
            if costs_s[heavy] < self._options.high_load_threshold * costs_s[light]:
                break


class _PrebleTree(PrefixWindow):
    """When a node is split and only the new front of it is longer than what precedes it, that is counted."""

    def node_split(self, upper: RadixNode, lower: RadixNode) -> None:
        super().node_split(upper, lower)
        if _is_large(upper) and not _is_large(lower):
            self.move_use(lower, upper)


def _is_large(node: RadixNode) -> bool:
    """More tokens than all before it."""
    return node.num_chars > node.chars_before


def _important(leaf: RadixNode) -> RadixNode:
    """The nearest node, from the leaf up, that is longer than what precedes it."""
    node = leaf
    while not _is_large(node) and node.parent is not None:
        node = node.parent
    return node


def _decode_token_s(candidate: Candidate) -> float:
    """Seconds per token of its running sequences: one step of them all."""
    load = candidate.load
    if load.step_time is None:
        return DECODE_TOKEN_S
    running = max(1, load.num_running)
    return load.step_time.step_s(running, float(load.context_tokens), running)
