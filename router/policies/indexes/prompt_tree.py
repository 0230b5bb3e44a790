"""Prompts as paths of a prefix window, their unfinished last block included.

Blocks are shared by name; the tokens after the last full block are nobody else's, so a prompt whose blocks
are all known ends in a leaf of its own, as it would in a tree of tokens. Knows blocks; decides nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from cache.types import ReplicaId
from router.policies.base import PolicyRequest
from router.policies.indexes.prefix_window import PrefixWindow
from router.policies.indexes.radix_tree import RadixMatch, RadixNode


class Leaf(NamedTuple):
    """Where a prompt ends in the tree, or would if it were sent."""

    match: RadixMatch  # of its blocks
    new_tokens: int  # of the leaf
    known_tokens: int  # before it


class PromptTree:
    """Reads and extends one prefix window, prompt by prompt."""

    def __init__(self, window: PrefixWindow, block_size: int) -> None:
        self._window = window
        self._block_size = block_size
        self._num_tails = 0

    def find(self, request: PolicyRequest) -> Leaf:
        """Changes nothing. A prompt that is known to its last token ends where its twin did."""
        match = self._window.match(tuple(request.hints))
        known, total = match.length * self._block_size, request.shape.num_prompt_tokens
        if known >= total:
            known = match.node.chars_before
        return Leaf(match, max(total - known, 0), known)

    def send(self, request: PolicyRequest, owner: ReplicaId) -> RadixNode:
        """The prompt went to `owner`; its leaf."""
        symbols = tuple(request.hints)
        tail_tokens = request.shape.num_prompt_tokens - len(symbols) * self._block_size
        if tail_tokens > 0 and self._window.match(symbols).length == len(symbols):
            self._num_tails += 1
            return self._window.insert((*symbols, -self._num_tails), tail_tokens, owner)
        return self._window.insert(symbols, self._block_size, owner)
