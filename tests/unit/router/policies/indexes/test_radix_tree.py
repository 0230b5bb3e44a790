"""The shared radix tree: splits, owners, and who forgets what first."""

from __future__ import annotations

from cache.types import ReplicaId
from router.policies.indexes.radix_tree import RadixTree, nearest_owners

A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")


def tree(max_chars: int = 1000, owners: str = "ab") -> RadixTree:
    made = RadixTree()
    for owner in owners:
        made.add_owner(ReplicaId(owner), max_chars)
    return made


def test_a_match_may_end_inside_an_edge() -> None:
    t = tree()
    t.insert("You are a cook.", 1, A)
    match = t.match("You are a lawyer.")
    assert match.length == len("You are a ")
    assert match.node.owners.keys() == {A}


def test_where_prompts_part_the_edge_is_split() -> None:
    t = tree()
    t.insert("abcdef", 1, A)
    t.insert("abcxyz", 1, B)
    assert t.num_nodes == 3
    assert t.match("abc").node.owners.keys() == {A, B}
    assert t.match("abcd").node.owners.keys() == {A}
    assert t.match("abcx").node.owners.keys() == {B}


def test_a_prompt_that_ends_inside_an_edge_splits_it() -> None:
    t = tree()
    t.insert("abcdef", 1, A)
    node = t.insert("abc", 1, B)
    assert (node.edge, node.chars_before, node.end_chars) == ("abc", 0, 3)
    assert node.owners.keys() == {A, B}
    assert t.match("abcdef").node.owners.keys() == {A}


def test_a_match_among_some_ends_where_theirs_does() -> None:
    t = tree()
    t.insert("abcdef", 1, A)
    t.insert("abc", 1, B)
    assert t.match("abcdef", among={B}).length == 3
    assert t.match("abcdef", among={C}).length == 0
    assert t.match("abcdef", among={A, C}).length == 6


def test_the_last_owner_is_who_was_given_it_last() -> None:
    t = tree()
    t.insert("abc", 1, A)
    t.insert("abcdef", 1, B)
    assert t.match("abc").node.last_owner == B
    t.insert("abc", 1, A)
    assert t.match("abc").node.last_owner == A
    assert t.match("abcdef").node.last_owner == B


def test_without_its_last_owner_a_node_falls_to_another() -> None:
    t = tree()
    t.insert("abc", 1, A)
    t.insert("abc", 1, B)
    t.remove_owner(B)
    assert t.match("abc").node.last_owner == A


def test_an_owner_forgets_its_least_recently_used_leaf_first() -> None:
    t = tree(max_chars=9, owners="a")
    t.insert("abc111", 1, A)
    t.insert("abc222", 1, A)  # 9 characters: abc, 111, 222
    t.insert("abc111", 1, A)
    t.insert("abc333", 1, A)
    assert t.match("abc222").length == 3
    assert t.match("abc111").length == 6
    assert t.match("abc333").length == 6
    assert t.num_chars(A) == 9


def test_what_others_own_stays_when_one_forgets() -> None:
    t = tree()
    t.insert("abc111", 1, A)
    t.insert("abc111", 1, B)
    t.trim(A, 0)
    assert t.num_chars(A) == 0
    assert t.match("abc111").node.owners.keys() == {B}


def test_a_prompt_larger_than_the_bound_is_not_kept() -> None:
    t = tree(max_chars=3, owners="a")
    t.insert("abcdef", 1, A)
    assert t.num_chars(A) == 0
    assert t.num_nodes == 0


def test_blocks_count_for_their_characters() -> None:
    t = tree(max_chars=200, owners="a")
    t.insert((1, 2, 3), 64, A)
    assert t.num_chars(A) == 192
    assert t.match((1, 2, 9)).length == 2
    t.insert((7,), 64, A)
    assert t.match((1, 2, 3)).length == 0


def test_text_and_blocks_live_in_one_tree() -> None:
    t = tree()
    t.insert("abc", 1, A)
    t.insert((97, 98), 64, B)
    assert t.match("abc").node.owners.keys() == {A}
    assert t.match((97, 98)).node.owners.keys() == {B}


def test_an_unknown_owner_is_given_nothing() -> None:
    t = tree()
    t.insert("abc", 1, C)
    assert t.num_nodes == 0
    assert C not in t


def test_an_owner_that_left_takes_its_nodes_along() -> None:
    t = tree()
    t.insert("abcdef", 1, A)
    t.insert("abcxyz", 1, B)
    t.remove_owner(A)
    assert t.match("abcdef").length == 3
    assert t.num_nodes == 2  # abc, xyz
    t.remove_owner(B)
    assert t.num_nodes == 0
    assert t.root.children == {}


def test_a_reassigned_subtree_has_one_owner() -> None:
    t = tree(owners="abc")
    t.insert("abc111", 1, A)
    t.insert("abc222", 1, B)
    t.insert("abc", 1, B)
    t.reassign(t.match("abc").node, C)
    assert t.match("abc111").node.owners.keys() == {C}
    assert t.match("abc222").node.owners.keys() == {C}
    assert (t.num_chars(A), t.num_chars(B), t.num_chars(C)) == (0, 0, 9)


def test_a_reassigned_leaf_leaves_its_ancestors_where_they_were() -> None:
    t = tree()
    t.insert("abc111", 1, A)
    t.insert("abc222", 1, A)
    t.reassign(t.match("abc111").node, B)
    assert t.match("abc111").node.owners.keys() == {B}
    assert t.match("abc").node.owners.keys() == {A, B}
    assert t.match("abc222").node.owners.keys() == {A}


def test_the_nearest_owners_may_own_an_ancestor() -> None:
    t = tree(owners="abc")
    t.insert("abc", 1, A)
    t.insert("abcdef", 1, B)
    node = t.match("abcdef").node
    assert nearest_owners(node, {A, B}) == {B}
    assert nearest_owners(node, {A, C}) == {A}
    assert nearest_owners(node, {C}) == set()
