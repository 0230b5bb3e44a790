"""A radix tree that also knows what its prefixes cost lately: each replica's share of the prefill work.

Per node that requests of the window were counted at:
    miss rate = 1 - tokens found cached / tokens asked for
    work      = miss rate * requests * prefill_s(the edge's tokens, tokens up to its end)
and every owner of the node bears work / owners. Kept up to date with every change, never summed over the
tree. Source of the idea: Preble (Srivatsa et al., ICLR 2025). Knows tokens and seconds; decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from cache.types import ReplicaId
from router.policies.indexes.radix_tree import RadixNode, RadixTree

MAX_REQUESTS = 100_000  # remembered in the window; beyond it, the oldest leave early


class NodeUse:
    """What requests of the window asked of one node, and who bears it. Read-only outside this module."""

    __slots__ = (
        "bearers",
        "borne_requests",
        "cached_tokens",
        "node",
        "num_requests",
        "num_tokens",
        "share_s",
    )

    def __init__(self, node: RadixNode) -> None:
        self.node = node
        self.num_requests = 0
        self.num_tokens = 0  # in all their prompts
        self.cached_tokens = 0  # of those, found in the tree
        # What has been added to the sums of these owners, to be taken back when anything changes.
        self.bearers: tuple[ReplicaId, ...] = ()
        self.share_s = 0.0
        self.borne_requests = 0

    @property
    def miss_rate(self) -> float:
        return 1.0 - self.cached_tokens / self.num_tokens if self.num_tokens else 1.0


class _Counted(NamedTuple):
    """One request of the window."""

    at: float
    use: NodeUse
    num_tokens: int
    cached_tokens: int


class OwnerUse:
    """One owner's sums over the nodes it owns."""

    __slots__ = ("num_nodes", "num_requests", "work_s")

    def __init__(self) -> None:
        self.work_s = 0.0  # its share of the prefill work of the window
        self.num_requests = 0  # of the window, counted at nodes it owns
        self.num_nodes = 0  # of those nodes


class PrefixWindow(RadixTree):
    """A radix tree of blocks (a block's "chars" are its tokens here) with the use of the last `window_s`."""

    def __init__(self, *, window_s: float, prefill_s: Callable[[int, int], float]) -> None:
        """prefill_s: seconds to compute so many tokens that end a context of so many."""
        super().__init__()
        self._window_s = window_s
        self._prefill_s = prefill_s
        self._uses: dict[RadixNode, NodeUse] = {}
        self._counted: deque[_Counted] = deque()  # oldest first
        self._owner_uses: dict[ReplicaId, OwnerUse] = {}

    # --- asking -------------------------------------------------------------------------------

    def owner_use(self, owner: ReplicaId) -> OwnerUse:
        return self._owner_uses.get(owner) or OwnerUse()

    def uses(self) -> list[NodeUse]:
        """Every node's that requests of the window were counted at."""
        return list(self._uses.values())

    def prefill_s(self, node: RadixNode) -> float:
        """Seconds to compute the node's tokens after its ancestors'."""
        return self._prefill_s(node.num_chars, node.end_chars)

    def recompute_s(self, node: RadixNode) -> float:
        """Seconds to compute the node again for all its requests of the window; 0 if it had none."""
        use = self._uses.get(node)
        return use.miss_rate * use.num_requests * self.prefill_s(node) if use is not None else 0.0

    # --- telling ------------------------------------------------------------------------------

    def count(self, node: RadixNode, num_tokens: int, cached_tokens: int, now: float) -> None:
        """A prompt of so many tokens, so many of them in the tree already, is counted at this node."""
        if node is self.root:
            return
        use = self._uses.get(node)
        if use is None:
            use = self._uses[node] = NodeUse(node)
        use.num_requests += 1
        use.num_tokens += num_tokens
        use.cached_tokens += cached_tokens
        self._settle(use)
        self._counted.append(_Counted(now, use, num_tokens, cached_tokens))
        while len(self._counted) > MAX_REQUESTS:
            self._forget_oldest()

    def expire(self, now: float) -> None:
        """Requests before the window count no more."""
        began = now - self._window_s
        while self._counted and self._counted[0].at < began:
            self._forget_oldest()

    def move_use(self, node: RadixNode, successor: RadixNode) -> None:
        """What was counted at `node` counts at `successor` from now on, which nothing was counted at yet."""
        use = self._uses.pop(node, None)
        if use is not None:
            assert successor not in self._uses
            self._uses[successor] = use
            use.node = successor
            self._settle(use)

    # --- following the tree -------------------------------------------------------------------

    def add_owner(self, owner: ReplicaId, max_chars: int) -> None:
        super().add_owner(owner, max_chars)
        self._owner_uses.setdefault(owner, OwnerUse())

    def remove_owner(self, owner: ReplicaId) -> None:
        super().remove_owner(owner)
        self._owner_uses.pop(owner, None)

    def owner_joined(self, node: RadixNode, owner: ReplicaId) -> None:
        self._settle_at(node)

    def owner_left(self, node: RadixNode, owner: ReplicaId) -> None:
        self._settle_at(node)

    def node_split(self, upper: RadixNode, lower: RadixNode) -> None:
        self._settle_at(lower)

    # --- parts --------------------------------------------------------------------------------

    def _forget_oldest(self) -> None:
        counted = self._counted.popleft()
        use = counted.use
        use.num_requests -= 1
        use.num_tokens -= counted.num_tokens
        use.cached_tokens -= counted.cached_tokens
        self._settle(use)
        if not use.num_requests:
            del self._uses[use.node]

    def _settle_at(self, node: RadixNode) -> None:
        use = self._uses.get(node)
        if use is not None:
            self._settle(use)

    def _settle(self, use: NodeUse) -> None:
        """Its owners of this moment bear what is counted there at this moment."""
        for owner in use.bearers:
            sums = self._owner_uses[owner]
            sums.work_s -= use.share_s
            sums.num_requests -= use.borne_requests
            sums.num_nodes -= 1
            if not sums.num_nodes:
                sums.work_s = 0.0  # and whatever rounding had left in it
        use.bearers = tuple(use.node.owners) if use.num_requests else ()
        if not use.bearers:
            return
        use.share_s = self.recompute_s(use.node) / len(use.bearers)
        use.borne_requests = use.num_requests
        for owner in use.bearers:
            sums = self._owner_uses[owner]
            sums.work_s += use.share_s
            sums.num_requests += use.borne_requests
            sums.num_nodes += 1
