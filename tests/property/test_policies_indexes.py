"""Laws of what policies remember, against models too simple to be wrong."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.types import ReplicaId
from router.policies.indexes.prefix_window import PrefixWindow
from router.policies.indexes.radix_tree import RadixNode, RadixTree, Symbols

OWNERS = [ReplicaId(name) for name in "abc"]
UNBOUNDED = 10**9

prompts = st.one_of(
    st.text(alphabet="xy", min_size=1, max_size=8),
    st.lists(st.integers(1, 3), min_size=1, max_size=6).map(tuple),
)
owners = st.sampled_from(OWNERS)


def common_length(left: Symbols, right: Symbols) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


def nodes(tree: RadixTree) -> list[RadixNode]:
    found = [tree.root]
    for node in found:
        found.extend(node.children.values())
    return found[1:]


class TreeMachine(RuleBasedStateMachine):
    """A tree beside, per owner, every prompt it was sent since it joined."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.sent: dict[ReplicaId, list[Symbols]] = {}

    @rule(owner=owners)
    def join(self, owner: ReplicaId) -> None:
        self.tree.add_owner(owner, UNBOUNDED)
        self.sent.setdefault(owner, [])

    @rule(owner=owners)
    def leave(self, owner: ReplicaId) -> None:
        self.tree.remove_owner(owner)
        self.sent.pop(owner, None)

    @rule(owner=owners, prompt=prompts)
    def send(self, owner: ReplicaId, prompt: Symbols) -> None:
        self.tree.insert(prompt, 1, owner)
        if owner in self.sent:
            self.sent[owner].append(prompt)

    @rule(prompt=prompts)
    def match_is_the_longest_anybody_was_sent(self, prompt: Symbols) -> None:
        everybody = [sent for prompts_ in self.sent.values() for sent in prompts_]
        longest = max([common_length(sent, prompt) for sent in everybody], default=0)
        assert self.tree.match(prompt).length == longest

    @rule(prompt=prompts, owner=owners)
    def match_among_is_the_longest_they_were_sent(self, prompt: Symbols, owner: ReplicaId) -> None:
        longest = max([common_length(sent, prompt) for sent in self.sent.get(owner, [])], default=0)
        assert self.tree.match(prompt, among={owner}).length == longest

    @rule(prompt=prompts)
    def owners_of_a_match_are_those_that_were_sent_it(self, prompt: Symbols) -> None:
        match = self.tree.match(prompt)
        if match.length == match.node.end_chars and match.length:
            expected = {
                owner
                for owner, sent in self.sent.items()
                if any(common_length(one, prompt) >= match.length for one in sent)
            }
            assert match.node.owners.keys() == expected

    @invariant()
    def sizes_add_up(self) -> None:
        assert self.tree.num_nodes == len(nodes(self.tree))
        for owner in self.sent:
            owned = [node for node in nodes(self.tree) if owner in node.owners]
            assert self.tree.num_chars(owner) == sum(node.num_chars for node in owned)
            assert set(self.tree.oldest(owner)) == set(owned)

    @invariant()
    def children_are_owned_by_owners_of_their_parents_and_leave_first(self) -> None:
        for node in nodes(self.tree):
            assert node.owners
            assert node.last_owner in node.owners
            assert node.parent is not None
            assert node.chars_before == node.parent.end_chars
            if node.parent is not self.tree.root:
                assert node.parent is not None
                assert node.owners.keys() <= node.parent.owners.keys()
        for owner in self.sent:
            order = list(self.tree.oldest(owner))
            for index, node in enumerate(order):
                assert node.parent is self.tree.root or node.parent in order[index + 1 :]


class BoundedTreeMachine(RuleBasedStateMachine):
    """Eviction and reassignment, whatever else happens: sizes and ownership stay in order."""

    bound = 12

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        for owner in OWNERS:
            self.tree.add_owner(owner, self.bound)

    @rule(owner=owners, prompt=prompts)
    def send(self, owner: ReplicaId, prompt: Symbols) -> None:
        self.tree.insert(prompt, 1, owner)
        assert self.tree.match(prompt, among={owner}).length == len(prompt)

    @rule(owner=owners, most=st.integers(0, 12))
    def trim(self, owner: ReplicaId, most: int) -> None:
        self.tree.trim(owner, most)
        assert self.tree.num_chars(owner) <= most

    @rule(owner=owners)
    def leave_and_return(self, owner: ReplicaId) -> None:
        self.tree.remove_owner(owner)
        self.tree.add_owner(owner, self.bound)
        assert self.tree.num_chars(owner) == 0

    @precondition(lambda self: self.tree.num_nodes)
    @rule(owner=owners, pick=st.integers(0, 10**6))
    def reassign(self, owner: ReplicaId, pick: int) -> None:
        every = nodes(self.tree)
        node = every[pick % len(every)]
        self.tree.reassign(node, owner)
        assert node.owners.keys() == {owner}
        self.tree.trim(owner, self.bound)

    @invariant()
    def everything_is_within_its_bound(self) -> None:
        for owner in OWNERS:
            assert self.tree.num_chars(owner) <= self.bound
            owned = [node for node in nodes(self.tree) if owner in node.owners]
            assert self.tree.num_chars(owner) == sum(node.num_chars for node in owned)
        for node in nodes(self.tree):
            assert node.owners
            if node.parent is not self.tree.root:
                assert node.parent is not None
                assert node.owners.keys() <= node.parent.owners.keys()


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=30)
TestBoundedTree = BoundedTreeMachine.TestCase
TestBoundedTree.settings = settings(max_examples=60, stateful_step_count=30)

steps = st.lists(
    st.tuples(
        st.sampled_from(["send", "trim", "leave", "wait"]),
        owners,
        st.lists(st.integers(1, 3), min_size=1, max_size=5).map(tuple),
    ),
    max_size=25,
)


@given(steps)
@settings(max_examples=150)
def test_sums_per_replica_are_those_of_the_nodes_it_owns(
    story: list[tuple[str, ReplicaId, tuple[int, ...]]],
) -> None:
    """Kept up to date change by change, they equal what adding everything up gives."""
    window = PrefixWindow(window_s=10.0, prefill_s=lambda new, context: new + context / 7)
    now = 0.0
    for owner in OWNERS:
        window.add_owner(owner, 300)
    for step, owner, prompt in story:
        if step == "send":
            leaf = window.insert(prompt, 10, owner)
            window.count(leaf, leaf.end_chars, leaf.chars_before, now)
        elif step == "trim":
            window.trim(owner, 20)
        elif step == "leave":
            window.remove_owner(owner)
            window.add_owner(owner, 300)
        else:
            now += 4.0
            window.expire(now)
        for name in OWNERS:
            owned = [use for use in window.uses() if name in use.node.owners]
            sums = window.owner_use(name)
            work_s = sum(window.recompute_s(use.node) / len(use.node.owners) for use in owned)
            assert sums.work_s == pytest.approx(work_s, abs=1e-9)
            assert sums.num_requests == sum(use.num_requests for use in owned)
            assert sums.num_nodes == len(owned)
