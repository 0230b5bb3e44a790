"""A radix tree of prompts shared by several owners: who was sent which prefix, least recently used first out.

    root ── "You are a" {r0, r1, r2} ─┬─ " lawyer. ..." {r0}
                                      └─ " cook. ..."   {r1, r2}

A prompt is a `str` or a tuple of block ids; both may live in one tree. An owner of a node owns its
ancestors too, and loses leaves first. Knows sequences and owners; knows neither load nor engines.
Owner: the router's event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Set
from typing import NamedTuple

from cache.types import ReplicaId

Symbols = str | tuple[int, ...]


class RadixNode:
    """One edge and what hangs on it. Read-only outside this module."""

    __slots__ = ("chars_before", "chars_per_symbol", "children", "edge", "last_owner", "owners", "parent")

    def __init__(self, edge: Symbols, parent: RadixNode | None, chars_per_symbol: int) -> None:
        self.edge = edge
        self.parent = parent
        self.chars_before = parent.end_chars if parent is not None else 0  # from the root to this edge
        self.chars_per_symbol = chars_per_symbol
        self.children: dict[str | int, RadixNode] = {}  # by their edge's first symbol
        self.owners: dict[ReplicaId, None] = {}
        self.last_owner: ReplicaId | None = None  # who was given it most recently

    @property
    def num_chars(self) -> int:
        """Of this edge."""
        return len(self.edge) * self.chars_per_symbol

    @property
    def end_chars(self) -> int:
        """From the root to the end of this edge."""
        return self.chars_before + self.num_chars


class RadixMatch(NamedTuple):
    """How far a prompt is known. May end inside the node's edge."""

    node: RadixNode  # the deepest one that shares something; the root if nothing does
    length: int  # symbols, from the prompt's start


class RadixTree:
    """Prefixes and their owners, each remembered for so many characters at most."""

    def __init__(self) -> None:
        self.root = RadixNode((), None, 1)
        self.num_nodes = 0
        # Nodes of each owner, least recently used first; a node always before its parent.
        self._held: dict[ReplicaId, OrderedDict[RadixNode, None]] = {}
        self._num_chars: dict[ReplicaId, int] = {}
        self._max_chars: dict[ReplicaId, int] = {}

    # --- owners -------------------------------------------------------------------------------

    def add_owner(self, owner: ReplicaId, max_chars: int) -> None:
        if owner not in self._held:
            self._held[owner] = OrderedDict()
            self._num_chars[owner] = 0
        self._max_chars[owner] = max_chars

    def remove_owner(self, owner: ReplicaId) -> None:
        """Forgets it; nodes nobody else owns go with it. O(its nodes)."""
        for node in list(self._held.get(owner, ())):
            self._disown(node, owner)
        self._held.pop(owner, None)
        self._num_chars.pop(owner, None)
        self._max_chars.pop(owner, None)

    def __contains__(self, owner: ReplicaId) -> bool:
        return owner in self._held

    def num_chars(self, owner: ReplicaId) -> int:
        """What it is remembered for; 0 if it is unknown."""
        return self._num_chars.get(owner, 0)

    def oldest(self, owner: ReplicaId) -> Iterator[RadixNode]:
        """Its nodes, least recently used first. Not valid across changes."""
        return iter(self._held.get(owner, ()))

    # --- prompts ------------------------------------------------------------------------------

    def match(self, symbols: Symbols, among: Set[ReplicaId] | None = None) -> RadixMatch:
        """The longest known prefix; with `among`, the longest that one of those owns.

        Changes nothing. O(symbols), at the speed of comparing memory.
        """
        node, position, total = self.root, 0, len(symbols)
        while position < total:
            child = node.children.get(symbols[position])
            if child is None or (among is not None and among.isdisjoint(child.owners)):
                break
            shared = _common_prefix(child.edge, symbols, position)
            node, position = child, position + shared
            if shared < len(child.edge):
                break
        return RadixMatch(node, position)

    def insert(self, symbols: Symbols, chars_per_symbol: int, owner: ReplicaId) -> RadixNode:
        """The prompt went to `owner`; the node where it ends.

        An unknown owner is given nothing. Evicts what the owner has beyond its share.
        """
        node, position = self.root, 0
        if owner not in self._held:
            return self.match(symbols).node
        while position < len(symbols):
            child = node.children.get(symbols[position])
            if child is None:
                node = self._grow(node, symbols[position:], chars_per_symbol)
                break
            shared = _common_prefix(child.edge, symbols, position)
            node = child if shared == len(child.edge) else self._split(child, shared)
            position += shared
        self._touch(node, owner)
        self.trim(owner, self._max_chars[owner])
        return node

    def trim(self, owner: ReplicaId, max_chars: int) -> None:
        """Forgets the owner's least recently used nodes until it is within `max_chars`."""
        held = self._held[owner]
        while held and self._num_chars[owner] > max_chars:
            self._disown(next(iter(held)), owner)

    def reassign(self, node: RadixNode, owner: ReplicaId) -> None:
        """The whole subtree is `owner`'s and nobody else's from now on. O(nodes below it)."""
        subtree = [node]
        for member in subtree:
            subtree.extend(member.children.values())
        subtree.reverse()  # children before parents
        for member in subtree:
            self._own(member, owner)
            self._held[owner].move_to_end(member)
        self._touch(node, owner)
        for member in subtree:
            for other in [name for name in member.owners if name != owner]:
                self._disown(member, other)

    # --- what a subclass may follow -----------------------------------------------------------

    def owner_joined(self, node: RadixNode, owner: ReplicaId) -> None:
        """`owner` has just become one of the node's owners."""

    def owner_left(self, node: RadixNode, owner: ReplicaId) -> None:
        """`owner` has just ceased to be one of the node's owners."""

    def node_split(self, upper: RadixNode, lower: RadixNode) -> None:
        """`lower` kept its identity and lost the front of its edge to the new `upper`."""

    # --- parts --------------------------------------------------------------------------------

    def _grow(self, parent: RadixNode, edge: Symbols, chars_per_symbol: int) -> RadixNode:
        node = RadixNode(edge, parent, chars_per_symbol)
        parent.children[edge[0]] = node
        self.num_nodes += 1
        return node

    def _split(self, lower: RadixNode, at: int) -> RadixNode:
        """The new node that takes the first `at` symbols of the edge. Its owners are the same."""
        parent = lower.parent
        assert parent is not None
        upper = self._grow(parent, lower.edge[:at], lower.chars_per_symbol)
        upper.children[lower.edge[at]] = lower
        upper.owners = dict(lower.owners)
        upper.last_owner = lower.last_owner
        lower.parent, lower.edge, lower.chars_before = upper, lower.edge[at:], upper.end_chars
        for owner in upper.owners:
            self._refresh(upper, owner)
        self.node_split(upper, lower)
        return upper

    def _touch(self, node: RadixNode, owner: ReplicaId) -> None:
        """The owner uses everything from this node up to the root."""
        above: RadixNode | None = node
        while above is not None and above is not self.root:
            self._own(above, owner)
            above.last_owner = owner
            above = above.parent
        self._refresh(node, owner)

    def _refresh(self, node: RadixNode, owner: ReplicaId) -> None:
        """Most recently used are this node and its ancestors, those last."""
        held = self._held[owner]
        above: RadixNode | None = node
        while above is not None and above is not self.root:
            held[above] = None
            held.move_to_end(above)
            above = above.parent

    def _own(self, node: RadixNode, owner: ReplicaId) -> None:
        if owner in node.owners:
            return
        node.owners[owner] = None
        self._held[owner][node] = None
        self._num_chars[owner] += node.num_chars
        self.owner_joined(node, owner)

    def _disown(self, node: RadixNode, owner: ReplicaId) -> None:
        del node.owners[owner]
        del self._held[owner][node]
        self._num_chars[owner] -= node.num_chars
        if node.last_owner == owner:
            node.last_owner = next(reversed(node.owners), None)
        self.owner_left(node, owner)
        if not node.owners:
            assert node.parent is not None
            assert not node.children, "an owner of a child owns its parent"
            del node.parent.children[node.edge[0]]
            self.num_nodes -= 1


def nearest_owners(node: RadixNode, among: Set[ReplicaId]) -> Set[ReplicaId]:
    """Those of `among` that own the node, or the nearest of its ancestors that one of them owns."""
    above: RadixNode | None = node
    while above is not None:
        owners = among & above.owners.keys()
        if owners:
            return owners
        above = above.parent
    return set()


def _common_prefix(edge: Symbols, symbols: Symbols, position: int) -> int:
    """Leading symbols of `edge` that `symbols` has at `position`."""
    piece = symbols[position : position + len(edge)]
    if piece == edge:
        return len(edge)
    low, high = 0, min(len(piece), len(edge))  # the answer is in [low, high]
    while low < high:
        middle = (low + high + 1) // 2
        if piece[low:middle] == edge[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
