"""Laws of the imitated caches: each replica's blocks are what an LRU of its capacity would hold.

A naive model keeps an ordered dict of blocks per replica, the least recently used first, and walks.
"""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.types import HashHint, ReplicaId
from router.index.approximate_trie import ApproximateTrie

CAPACITIES = {ReplicaId("tiny"): 1, ReplicaId("small"): 7, ReplicaId("other"): 20, ReplicaId("large"): 60}
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)


def hints_of(path: tuple[int, ...]) -> list[HashHint]:
    return [HashHint((hash((path[: i + 1])) * 2 + 1) % 2**64) for i in range(len(path))]


class ApproximateMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.trie = ApproximateTrie()
        self.held: dict[ReplicaId, OrderedDict[HashHint, None]] = {}
        self.asked: list[list[HashHint]] = []

    @rule(replica=st.sampled_from(sorted(CAPACITIES)))
    def join(self, replica: ReplicaId) -> None:
        self.trie.add_replica(replica, CAPACITIES[replica])
        self.held.setdefault(replica, OrderedDict())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted(self.held)))
        self.trie.remove_replica(replica)
        del self.held[replica]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), path=PATHS)
    def insert(self, data: st.DataObject, path: tuple[int, ...]) -> None:
        replica = data.draw(st.sampled_from(sorted(self.held)))
        hints = hints_of(path)
        self.trie.insert(replica, hints)
        held = self.held[replica]
        for hint in reversed(hints[: CAPACITIES[replica]]):  # the end first: it goes before its parents
            held[hint] = None
            held.move_to_end(hint)
        while len(held) > CAPACITIES[replica]:
            held.popitem(last=False)
        if hints not in self.asked:
            self.asked = [*self.asked[-9:], hints]

    @invariant()
    def jump_equals_walk(self) -> None:
        for hints in self.asked:
            assert self.trie.match(hints) == self.walk(hints)

    @invariant()
    def sizes_are_exact(self) -> None:
        for replica, held in self.held.items():
            assert self.trie.num_blocks(replica) == len(held) <= CAPACITIES[replica]
        assert self.trie.num_entries == len(set().union(*self.held.values()))
        nodes = list(self.trie._tree.nodes())
        assert self.trie._tree.num_nodes == len(nodes)
        assert self.trie._num_holds == sum(len(node.records) for node in nodes)

    def teardown(self) -> None:
        for replica in CAPACITIES:
            self.trie.remove_replica(replica)
        assert (self.trie.num_entries, self.trie._tree.num_nodes, self.trie._num_holds) == (0, 0, 0)

    def walk(self, hints: list[HashHint]) -> dict[ReplicaId, int]:
        found = {}
        for replica, held in self.held.items():
            depth = next((i for i, hint in enumerate(hints) if hint not in held), len(hints))
            if depth:
                found[replica] = depth
        return found


ApproximateMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50)
TestApproximate = ApproximateMachine.TestCase
