"""The compressed tree, step by step; its laws are those of what is built on it."""

from __future__ import annotations

from collections.abc import Sequence

from router.index.radix_tree import Node, RadixTree, packed


def a_tree() -> RadixTree[str]:
    return RadixTree(lambda record, upper: f"{record}+")


def add(tree: RadixTree[str], chain: Sequence[int], member: int) -> Node[str]:
    last = tree.extend(chain)
    for node in last.path():
        if member not in node.records:
            tree.join(node, member, f"m{member}")
    return last


def edges(tree: RadixTree[str]) -> list[list[int]]:
    return sorted(node.edge.tolist() for node in tree.nodes())


def test_chains_share_what_they_have_in_common() -> None:
    tree = a_tree()
    add(tree, [1, 2, 3, 4], 0)
    add(tree, [1, 2, 5], 1)
    assert edges(tree) == [[1, 2], [3, 4], [5]]
    assert (tree.num_nodes, tree.num_hints) == (3, 5)
    assert tree.match([1, 2, 3, 4, 9], 0b11) == [(2, 0b10), (4, 0b01)]
    assert tree.match([1, 2, 3], 0b11) == [(2, 0b10), (3, 0b01)]
    assert tree.match([1, 2, 3], 0b10) == [(2, 0b10)]
    assert tree.match([9], 0b11) == []


def test_a_chain_that_ends_inside_an_edge_cuts_it() -> None:
    tree = a_tree()
    add(tree, [1, 2, 3], 0)
    last = add(tree, [1, 2], 1)
    assert (last.start, last.end) == (0, 2)
    assert edges(tree) == [[1, 2], [3]]
    assert last.records == {0: "m0+", 1: "m1"}, "the upper half's record is the user's to make"
    assert tree.match([1, 2, 3], 0b11) == [(2, 0b10), (3, 0b01)]


def test_nodes_go_with_their_last_member() -> None:
    tree = a_tree()
    first, second = add(tree, [1, 2, 3], 0), add(tree, [1, 2, 4], 0)
    tree.leave(first, 0)
    assert edges(tree) == [[1, 2], [4]]
    for node in list(second.path()):
        tree.leave(node, 0)
    assert (tree.num_nodes, tree.num_hints, edges(tree)) == (0, 0, [])


def test_a_fork_without_branches_is_one_edge_again() -> None:
    tree = a_tree()
    lower = add(tree, [1, 2, 3], 0)
    upper = tree.split(lower, 1)
    assert tree.fuse(upper) is lower
    assert edges(tree) == [[1, 2, 3]]
    assert (lower.start, lower.end, lower.parent) == (0, 3, tree.root)
    assert tree.match([1, 2, 3], 1) == [(3, 1)]


def test_edges_are_copies_of_their_own() -> None:
    chain = packed([1, 2, 3, 4])
    tree = a_tree()
    add(tree, chain[::2], 0)
    chain[0] = 9
    assert edges(tree) == [[1, 3]]
