"""Chains of hints as a path-compressed tree: whoever holds a node holds the path to it.

A hint names its whole prefix, so two chains that agree at one place agree before it: how far a prompt and an
edge agree is found by bisection, and a prompt is matched in as many steps as others branch off its path,
however long it is.

                   ┌─ [c d] {1}            chains  a b c d   member 1
    root ─ [a b] {1 2}                             a b e     member 2
                   └─ [e] {2}

Every node carries its members as a bit set, and for each member a record of the user's (`predictions.py`
counts, `approximate_trie.py` keeps an order of use). Splitting a node gives its members to the new upper
half too; `on_split` makes the upper half's records.

Knows 64-bit hints and member numbers; knows neither replicas nor time. Owner: the router's event loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

Record = TypeVar("Record")

NODE_BYTES = 820  # a node with an edge, one member and its place in its parent, hints not counted
HINT_BYTES = 8


class Node(Generic[Record]):
    """Blocks [start, end) of every chain that goes through it. Written by `RadixTree` and its user alone."""

    __slots__ = ("children", "edge", "end", "members", "parent", "records", "start")

    def __init__(self, parent: Node[Record] | None, edge: memoryview[int], start: int) -> None:
        self.parent = parent
        self.edge = edge
        self.start = start
        self.end = start + len(edge)
        self.children: dict[int, Node[Record]] = {}  # by the first hint of the child's edge
        self.members = 0  # bit set; a child's is part of it
        self.records: dict[int, Record] = {}  # by member

    def path(self) -> Iterator[Node[Record]]:
        """This node, its parent, and so on; without the root."""
        node: Node[Record] = self
        while node.parent is not None:
            yield node
            node = node.parent


class RadixTree(Generic[Record]):
    """See the module's text. Nodes without members are taken out by `leave`, never by themselves."""

    def __init__(self, on_split: Callable[[Record, Node[Record]], Record]) -> None:
        """on_split: (the record of one member at the node that becomes the lower half, the new upper half)
        -> that member's record at the upper half."""
        self._on_split = on_split
        self.root: Node[Record] = Node(None, packed([]), 0)
        self.num_nodes = 0
        self.num_hints = 0  # on all edges together

    # --- questions ----------------------------------------------------------------------------

    def match(self, chain: Sequence[int], members: int) -> list[tuple[int, int]]:
        """(depth, those of `members` that hold so many leading blocks of the chain and no more), shallowest
        first. Changes nothing. O(nodes on its path * log(blocks))."""
        steps: list[tuple[int, int]] = []
        node, end = self.root, len(chain)
        depth = 0
        while depth < end:
            child = node.children.get(chain[depth])
            if child is None:
                break
            members &= child.members
            if not members:
                break
            depth += _agreement(child.edge, chain, depth)
            steps.append((depth, members))
            if depth < child.end:
                break
            node = child
        deeper = 0
        for place in range(len(steps) - 1, -1, -1):
            depth, members = steps[place]
            steps[place] = depth, members & ~deeper
            deeper = members
        return steps

    def nodes(self) -> Iterator[Node[Record]]:
        """Every node but the root, parents first. O(nodes)."""
        todo = list(self.root.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())

    def num_bytes(self) -> int:
        return NODE_BYTES * self.num_nodes + HINT_BYTES * self.num_hints

    # --- changes ------------------------------------------------------------------------------

    def extend(self, chain: Sequence[int]) -> Node[Record]:
        """The node that ends where the chain does, made if need be; the caller has members join it.

        chain: not empty. O(nodes on its path * log(blocks)), and a copy of the hints that are new.
        """
        node, end = self.root, len(chain)
        while node.end < end:
            start = node.end
            child = node.children.get(chain[start])
            if child is None:
                return self._hang(node, packed(chain[start:]))
            agreed = _agreement(child.edge, chain, start)
            node = child if agreed == len(child.edge) else self.split(child, agreed)
        return node

    def join(self, node: Node[Record], member: int, record: Record) -> None:
        """The member holds this node; it must hold the parent, now or before the caller is done."""
        node.records[member] = record
        node.members |= 1 << member

    def leave(self, node: Node[Record], member: int) -> None:
        """The member holds this node no more; it must not hold any child."""
        del node.records[member]
        node.members ^= 1 << member
        if not node.members:
            self._cut(node)

    def split(self, node: Node[Record], length: int) -> Node[Record]:
        """Cut the node's edge after `length` hints, 0 < length < its own. The upper half, a new node."""
        assert node.parent is not None
        assert 0 < length < len(node.edge)
        upper: Node[Record] = Node(node.parent, packed(node.edge[:length]), node.start)
        node.parent.children[upper.edge[0]] = upper
        node.parent, node.start, node.edge = upper, upper.end, packed(node.edge[length:])
        upper.children[node.edge[0]] = node
        upper.members = node.members
        for member, record in node.records.items():
            upper.records[member] = self._on_split(record, upper)
        self.num_nodes += 1
        return upper

    def fuse(self, node: Node[Record]) -> Node[Record]:
        """Undo a split: the node's only child takes over its edge. The child, with its own records."""
        (child,) = node.children.values()
        assert node.parent is not None
        assert child.members == node.members
        child.edge = packed([*node.edge, *child.edge])
        child.parent, child.start = node.parent, node.start
        node.parent.children[child.edge[0]] = child
        self.num_nodes -= 1
        return child

    def _hang(self, parent: Node[Record], edge: memoryview[int]) -> Node[Record]:
        node: Node[Record] = Node(parent, edge, parent.end)
        parent.children[edge[0]] = node
        self.num_nodes += 1
        self.num_hints += len(edge)
        return node

    def _cut(self, node: Node[Record]) -> None:
        assert node.parent is not None
        assert not node.children
        del node.parent.children[node.edge[0]]
        self.num_nodes -= 1
        self.num_hints -= len(node.edge)


def packed(hints: Sequence[int]) -> memoryview[int]:
    """The hints in memory of their own, 8 bytes each."""
    if isinstance(hints, memoryview):
        return memoryview(hints.tobytes()).cast("Q")
    return memoryview(array("Q", hints))


def _agreement(edge: memoryview[int], chain: Sequence[int], start: int) -> int:
    """How many hints of the edge the chain has from `start` on; the first is known to agree."""
    low, high = 1, min(len(edge), len(chain) - start)
    if edge[high - 1] == chain[start + high - 1]:
        return high
    while low < high - 1:  # `low` agree, `high` do not
        middle = (low + high) // 2
        if edge[middle - 1] == chain[start + middle - 1]:
            low = middle
        else:
            high = middle
    return low
