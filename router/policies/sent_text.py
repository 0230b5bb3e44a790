"""What text each replica was sent, in one tree: the memory of policies that place by the longest like text.

Knows prompts and replicas; ranks nothing.
"""

from __future__ import annotations

from cache.messages import ReplicaInfo
from cache.types import ReplicaId
from router.policies.base import PolicyRequest
from router.policies.indexes.radix_tree import RadixTree
from router.policies.prompt_parts import PromptText, prompt_text
from router.policies.stateful import StatefulPolicy


class SentText(StatefulPolicy):
    """A base for policies with such a tree. Text enters it when it is sent, whichever rule chose."""

    def __init__(self, block_size: int, max_tree_chars: int) -> None:
        """block_size: tokens, where blocks stand for text; max_tree_chars: kept of each replica."""
        self._block_size = block_size
        self._max_tree_chars = max_tree_chars
        self._tree = RadixTree()

    def _text(self, request: PolicyRequest) -> PromptText:
        return prompt_text(request, self._block_size)

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self._tree.add_owner(replica_id, self._max_tree_chars)

    def replica_removed(self, replica_id: ReplicaId) -> None:
        self._tree.remove_owner(replica_id)

    def routed(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        text = self._text(request)
        self._tree.insert(text.symbols, text.chars_per_symbol, replica_id)
