"""A radix tree over token runs: who shares which slots, and what is evicted next.

    root ── "You are a helpful assistant. " ─┬─ "What is 2 + 2? It is 4."
                                             └─ "And the moon?"

A node is a run of tokens and, token by token, the slot that holds its keys and values. No two children of a
node begin with the same token, so a prefix is found by one lookup per node and one comparison of its run.
A node is split where two prefixes part, to the token.

Eviction: a node that nobody uses waits in a queue, its descendants before it, and the first in the queue
loses slots off its end. So leaves leave first, the least recently released first.

A node may be a promise: its tokens are computed in the step in progress. Matching finds it; `keep_all` makes
it last, `withdraw` takes it out.
Source: RadixAttention (Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs",
2024); here with promises, and with leaves that lose as many tokens as are needed rather than all.
Knows tokens and slots; knows neither sequences nor block tables. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from cache.errors import NoFreeBlocks
from cache.types import BlockHash

TOKEN_BYTES = 4  # little-endian int32


class Node:
    """A run of tokens that all who share any of it share whole. Written by `RadixTree` alone."""

    __slots__ = (
        "children",
        "is_cached",
        "is_promise",
        "next_idle",
        "parent",
        "prev_idle",
        "ref_count",
        "slots",
        "tokens",
    )

    def __init__(self, parent: Node | None, tokens: bytes | bytearray, slots: list[int]) -> None:
        self.parent = parent  # None = a root, which has no tokens
        self.tokens = bytearray(tokens)  # TOKEN_BYTES each
        self.slots = slots  # one per token
        self.children: dict[bytes, Node] = {}  # by their first token's bytes
        self.ref_count = 0  # users of this node: all whose prefix ends here or further on
        self.is_cached = True  # False: withdrawn while somebody uses it; its slots are free when nobody does
        self.is_promise = False
        self.prev_idle: Node = self  # itself while in use
        self.next_idle: Node = self

    def __len__(self) -> int:
        return len(self.slots)

    def path(self) -> Iterator[Node]:
        """This node and those above it, the root left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Place(NamedTuple):
    """A point in the tree: so far into a node, which may be its end."""

    node: Node
    offset: int  # tokens of the node before the point; all of them at its end, 0 at a root
    depth: int  # tokens from the root to the point


class RadixTree:
    """Every slot is free, idle (in a node that nobody uses) or in use."""

    def __init__(self, num_slots: int) -> None:
        """num_slots: at least 1."""
        assert num_slots > 0, "a tree without slots"
        self.num_slots = num_slots
        self.num_cached = 0  # slots of cached nodes, promises included
        self.changes = 0  # counts what makes an earlier `Place` wrong
        self.sharings = 0  # counts users that came to a node beside others, or left it to them
        self._free = list(range(num_slots - 1, -1, -1))  # the next to be taken last
        self._num_idle = 0
        self._roots: dict[BlockHash, Node] = {}
        self._names: dict[Node, BlockHash] = {}  # of the roots
        self._promises: dict[Node, None] = {}  # parents before children
        self._end = Node(None, b"", [])  # closes the ring of idle nodes

    @property
    def num_free(self) -> int:
        """Slots that nobody uses, cached content included."""
        return len(self._free) + self._num_idle

    def root(self, name: BlockHash) -> Node:
        """The root under that name, made if need be. It is forgotten with its last child and user."""
        root = self._roots.get(name)
        if root is None:
            root = self._roots[name] = Node(None, b"", [])
            self._names[root] = name
        return root

    def roots(self) -> dict[BlockHash, Node]:
        """For tests and drawing."""
        return dict(self._roots)

    def idle(self) -> list[Node]:
        """Nodes that nobody uses, in the order in which they go. For tests and drawing. O(nodes)."""
        nodes, node = [], self._end.next_idle
        while node is not self._end:
            nodes.append(node)
            node = node.next_idle
        return nodes

    # -- looking ----------------------------------------------------------------------------------

    def find(self, name: BlockHash, tokens: bytes) -> Place:
        """How far these tokens are cached. Changes nothing. O(tokens matched)."""
        root = self._roots.get(name)
        if root is None:
            return Place(Node(None, b"", []), 0, 0)
        return descend(root, tokens)

    # -- using ------------------------------------------------------------------------------------

    def use(self, place: Place) -> Node:
        """One more user of everything up to `place`; the node that now ends there, split off if need be."""
        node = self._cut(place.node, place.offset)
        self._add_user(node)
        return node

    def leave(self, node: Node) -> None:
        """One user less of the node and of all above it; last first, so that tails wait before prefixes."""
        while node.parent is not None:
            node.ref_count -= 1
            if node.ref_count == 0:
                self._rest(node)
            else:
                self.sharings += 1
            node = node.parent
        node.ref_count -= 1
        self._forget_if_bare(node)

    def extend(self, node: Node, tokens: bytes, slots: list[int]) -> tuple[Node, list[int]]:
        """The user of `node` goes on with these tokens, which it computes into these slots in this step.

        Tokens that the tree has already stay in the slots they are in. The node that the user then ends at,
        and the slots of what was there: as many as the first of `slots`, which are the user's alone.
        """
        have: list[int] = []
        while len(have) < len(slots):
            rest = tokens[len(have) * TOKEN_BYTES :]
            child = node.children.get(rest[:TOKEN_BYTES])
            if child is None:
                return self._promise(node, rest, slots[len(have) :]), have
            node = self._cut(child, shared_tokens(child.tokens, rest))
            self._come_to(node)
            have += node.slots
        return node, have

    # -- promises ---------------------------------------------------------------------------------

    def keep_all(self) -> None:
        """Every promise is kept: what was computed lasts."""
        for node in self._promises:
            node.is_promise = False
        for node in self._promises:
            self.join_parent(node)
        self._promises.clear()

    def withdraw(self, nodes: list[Node]) -> None:
        """These promises, children before parents, will not be kept: out of the tree, their users left."""
        for node in nodes:
            assert node.is_promise, "withdrawn, but not a promise"
            assert node.parent is not None
            assert not any(child.is_cached for child in node.children.values()), "what follows goes first"
            del self._promises[node]
            del node.parent.children[bytes(node.tokens[:TOKEN_BYTES])]
            node.is_cached = node.is_promise = False
            self.num_cached -= len(node)
            self.changes += 1

    def withdraw_all(self) -> None:
        """No promise is kept."""
        self.withdraw(list(reversed(self._promises)))

    @property
    def has_promises(self) -> bool:
        return bool(self._promises)

    # -- slots ------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """So many slots; what was least recently used goes for them.

        Raises NoFreeBlocks and changes nothing when there are too few.
        """
        if count > self.num_free:
            raise NoFreeBlocks(needed=count, free=self.num_free)
        self._evict(count - len(self._free))
        first = len(self._free) - count
        slots = self._free[first:]
        del self._free[first:]
        slots.reverse()
        return slots

    def free(self, slots: list[int]) -> None:
        """Slots that are in no node are nobody's now."""
        self._free += slots

    def evict_all(self) -> None:
        """Forget everything that nobody uses."""
        self._evict(self._num_idle)

    def _evict(self, count: int) -> None:
        while count > 0:
            node = self._end.next_idle
            assert node is not self._end, "fewer idle slots than counted"
            assert not node.children, "a prefix would go before what follows it"
            taken = min(count, len(node))
            self._free += node.slots[: -taken - 1 : -1]
            self._num_idle -= taken
            self.num_cached -= taken
            self.changes += 1
            count -= taken
            if taken < len(node):
                del node.slots[-taken:], node.tokens[-taken * TOKEN_BYTES :]
                return
            self._unlink(node)
            assert node.parent is not None
            del node.parent.children[bytes(node.tokens[:TOKEN_BYTES])]
            self._forget_if_bare(node.parent)

    # -- nodes ------------------------------------------------------------------------------------

    def _promise(self, parent: Node, tokens: bytes, slots: list[int]) -> Node:
        node = Node(parent, tokens, slots)
        parent.children[tokens[:TOKEN_BYTES]] = node
        node.ref_count, node.is_promise = 1, True
        self._promises[node] = None
        self.num_cached += len(slots)
        return node

    def _cut(self, node: Node, offset: int) -> Node:
        """The node that ends `offset` tokens into this one: split, this one keeps the rest and its users."""
        if offset == len(node):
            return node
        assert 0 < offset < len(node), "a node without tokens"
        assert node.parent is not None
        upper = Node(node.parent, node.tokens[: offset * TOKEN_BYTES], node.slots[:offset])
        upper.ref_count, upper.is_promise = node.ref_count, node.is_promise
        node.parent.children[bytes(upper.tokens[:TOKEN_BYTES])] = upper
        del node.tokens[: offset * TOKEN_BYTES], node.slots[:offset]
        upper.children[bytes(node.tokens[:TOKEN_BYTES])] = node
        node.parent = upper
        if node.ref_count == 0:
            self._link_behind(node, upper)
        if node.is_promise:  # the upper one right before it: parents stay before children
            pairs = ((upper, node) if promise is node else (promise,) for promise in self._promises)
            self._promises = dict.fromkeys(chain.from_iterable(pairs))
        self.changes += 1
        return upper

    def join_parent(self, node: Node) -> None:
        """Make one of a node and the one above it, where their users do not tell them apart. Else nothing.

        The node stays, with both runs.
        """
        parent = node.parent
        if parent is None or parent.parent is None or parent.is_promise or not node.ref_count:
            return
        if len(parent.children) > 1 or parent.ref_count != node.ref_count:
            return
        # Nobody's prefix ends between the two: it would be a user of the upper one alone.
        parent.tokens += node.tokens
        parent.slots += node.slots
        node.tokens, node.slots, node.parent = parent.tokens, parent.slots, parent.parent
        node.parent.children[bytes(node.tokens[:TOKEN_BYTES])] = node
        self.changes += 1

    def _add_user(self, node: Node) -> None:
        while node.parent is not None:
            self._come_to(node)
            node = node.parent
        node.ref_count += 1

    def _come_to(self, node: Node) -> None:
        """One more user of this node."""
        if node.ref_count == 0:
            self._unlink(node)
            self._num_idle -= len(node)
        else:
            self.sharings += 1
        node.ref_count += 1

    def _rest(self, node: Node) -> None:
        """Nobody uses the node any more."""
        if node.is_cached:
            self._link_behind(self._end.prev_idle, node)
            self._num_idle += len(node)
        else:
            self._free += node.slots

    def _link_behind(self, before: Node, node: Node) -> None:
        node.prev_idle, node.next_idle = before, before.next_idle
        before.next_idle.prev_idle = node
        before.next_idle = node

    def _unlink(self, node: Node) -> None:
        node.prev_idle.next_idle, node.next_idle.prev_idle = node.next_idle, node.prev_idle
        node.prev_idle = node.next_idle = node

    def _forget_if_bare(self, root: Node) -> None:
        if root.parent is None and not root.children and root.ref_count == 0:
            del self._roots[self._names.pop(root)]


def descend(node: Node, tokens: bytes) -> Place:
    """How far these tokens are found below `node`. O(tokens matched)."""
    depth, offset = 0, len(node)
    while (child := node.children.get(tokens[depth * TOKEN_BYTES : (depth + 1) * TOKEN_BYTES])) is not None:
        rest = tokens[depth * TOKEN_BYTES : depth * TOKEN_BYTES + len(child.tokens)]
        node, offset = child, shared_tokens(child.tokens, rest)
        depth += offset
        if offset < len(child):
            break
    return Place(node, offset, depth)


def shared_tokens(left: bytes | bytearray, right: bytes | bytearray) -> int:
    """How many leading tokens are the same."""
    size = min(len(left), len(right))
    left, right = left[:size], right[:size]
    if left == right:
        return size // TOKEN_BYTES
    difference = int.from_bytes(left, "little") ^ int.from_bytes(right, "little")
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)
