"""What holds of a radix tree at any moment, and how it is drawn."""

from __future__ import annotations

from typing import Any

from cache.radix_tree import TOKEN_BYTES, Node, RadixTree


def nodes_of(tree: RadixTree) -> list[Node]:
    """Every cached node but the roots, parents before children."""
    found: list[Node] = []
    fringe = list(tree.roots().values())
    while fringe:
        node = fringe.pop()
        found.append(node)
        fringe += node.children.values()
    return [node for node in found if node.parent is not None]


def check_tree(tree: RadixTree) -> None:
    """Every law of the tree. O(tokens)."""
    nodes, idle = nodes_of(tree), tree.idle()
    for node in nodes:
        assert len(node.tokens) == TOKEN_BYTES * len(node) > 0
        assert node.parent is not None
        assert node.parent.children[bytes(node.tokens[:TOKEN_BYTES])] is node
        assert node.parent.ref_count >= sum(child.ref_count for child in node.parent.children.values())
        assert node.is_promise or not node.parent.is_promise, "computed behind what is yet to be"
    slots = [slot for node in nodes for slot in node.slots]
    assert len(set(slots)) == len(slots) == tree.num_cached, "a slot is in two places"
    assert set(map(id, idle)) == {id(node) for node in nodes if node.ref_count == 0}
    place = {id(node): number for number, node in enumerate(idle)}
    for node in idle:
        for child in node.children.values():
            assert place[id(child)] < place[id(node)], "a prefix would go before what follows it"
    for root in tree.roots().values():
        assert root.children or root.ref_count, "nobody needs it"


def drawn(node: Node) -> Any:
    """A node's subtree as a reader would draw it: text -> [users, children], letters for tokens."""
    return {
        text_of(child): [child.ref_count, drawn(child)]
        for _, child in sorted(node.children.items(), key=lambda item: text_of(item[1]))
    }


def text_of(node: Node) -> str:
    """A node's run, letters for tokens."""
    numbers = memoryview(bytes(node.tokens)).cast("i")
    return "".join(map(chr, numbers))
