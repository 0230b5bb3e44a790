"""Laws of the index: jumping equals walking; what is left after a replica has gone is nothing.

A naive model keeps, per replica, a set of exact blocks and a list of live predictions, and walks.
"""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache.events import digest_of
from cache.types import HashHint, ReplicaId
from router.index.departed import Departed
from router.index.hash_trie import HashTrie
from router.index.packed_table import PackedTable

REPLICAS = [ReplicaId(f"r{i}") for i in range(4)]
TTL_S = 5.0
# Prompts are paths in a small tree, so that chains share prefixes of every length.
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)


def hints_of(path: tuple[int, ...]) -> list[HashHint]:
    """Hint of each prefix of the path; spread over 64 bits."""
    return [HashHint(hash_prefix(path[: i + 1])) for i in range(len(path))]


def hash_prefix(prefix: tuple[int, ...]) -> int:
    number = 1
    for step in prefix:
        number = number * 2 + step
    return number * 0x9E3779B97F4A7C15 % (1 << 64)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.trie = HashTrie()
        self.now = 0.0
        self.exact: dict[ReplicaId, set[HashHint]] = {}
        self.hosted: dict[ReplicaId, set[HashHint]] = {}  # of those, in host memory alone
        self.children: dict[HashHint, set[HashHint]] = {}
        self.predictions: dict[ReplicaId, dict[HashHint, tuple[list[HashHint], float]]] = {}
        self.asked: list[list[HashHint]] = []

    @rule(replica=st.sampled_from(REPLICAS))
    def join(self, replica: ReplicaId) -> None:
        self.trie.add_replica(replica)
        self.exact.setdefault(replica, set())
        self.hosted.setdefault(replica, set())
        self.predictions.setdefault(replica, {})

    @precondition(lambda self: self.exact)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted(self.exact)))
        self.trie.remove_replica(replica)
        del self.exact[replica], self.hosted[replica], self.predictions[replica]

    @precondition(lambda self: self.exact)
    @rule(data=st.data(), path=PATHS, backwards=st.booleans())
    def store(self, data: st.DataObject, path: tuple[int, ...], backwards: bool) -> None:
        """A batch stores a prompt, in any order within the batch, blocks it had included."""
        replica = data.draw(st.sampled_from(sorted(self.exact)))
        hints = self._learn(path)
        self.trie.store(replica, reversed(hints) if backwards else hints)
        self.exact[replica].update(hints)
        self.hosted[replica] -= set(hints)
        self._confirm(replica)

    @precondition(lambda self: any(self.exact.values()))
    @rule(data=st.data(), share=st.floats(0, 1))
    def demote(self, data: st.DataObject, share: float) -> None:
        """A batch says that a block and all behind it are in host memory, some of them again."""
        replica = data.draw(st.sampled_from(sorted(r for r in self.exact if self.exact[r])))
        held = sorted(self.exact[replica])
        moved = self._with_descendants(held[int(share * (len(held) - 1))]) & self.exact[replica]
        self.trie.host(replica, data.draw(st.permutations(sorted(moved))))
        self.hosted[replica] |= moved

    @precondition(lambda self: any(self.exact.values()))
    @rule(data=st.data(), share=st.floats(0, 1))
    def evict(self, data: st.DataObject, share: float) -> None:
        """A batch removes a block with all its descendants, in any order within the batch."""
        replica = data.draw(st.sampled_from(sorted(r for r in self.exact if self.exact[r])))
        held = sorted(self.exact[replica])
        gone = self._with_descendants(held[int(share * (len(held) - 1))]) & self.exact[replica]
        self.trie.remove(replica, data.draw(st.permutations(sorted(gone))))
        self.trie.remove(replica, [HashHint(12345)])  # never stored: ignored
        self.exact[replica] -= gone
        self.hosted[replica] -= gone

    @precondition(lambda self: self.exact)
    @rule(data=st.data(), paths=st.lists(PATHS, max_size=4))
    def snapshot(self, data: st.DataObject, paths: list[tuple[int, ...]]) -> None:
        replica = data.draw(st.sampled_from(sorted(self.exact)))
        hashes = {hint for path in paths for hint in self._learn(path)}
        cut = data.draw(st.sampled_from(sorted(hashes))) if hashes else None
        hosted = (
            self._with_descendants(cut) & hashes if cut is not None and data.draw(st.booleans()) else set()
        )
        self.trie.replace(replica, hashes, sorted(hosted))
        self.exact[replica], self.hosted[replica] = hashes, hosted
        self._confirm(replica)

    @precondition(lambda self: self.exact)
    @rule(data=st.data(), path=PATHS)
    def predict(self, data: st.DataObject, path: tuple[int, ...]) -> None:
        replica = data.draw(st.sampled_from(sorted(self.exact)))
        hints = self._learn(path)
        self.trie.predict(replica, hints, self.now + TTL_S)
        if hints[-1] in self.exact[replica]:
            return
        self.predictions[replica][hints[-1]] = (hints, self.now + TTL_S)

    @rule(seconds=st.floats(0, 6))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        self.trie.expire(self.now)
        for live in self.predictions.values():
            for last in [last for last, (_, until) in live.items() if until <= self.now]:
                del live[last]

    @invariant()
    def jump_equals_walk(self) -> None:
        for hints in self.asked:
            for replica in self.exact:  # before the match, which leaves its answer ready, and after it
                assert self.trie.num_exact(replica, hints) == self._depth(self.exact[replica], hints)
            assert self.trie.match(hints) == self._walk(hints)
            for replica in self.exact:
                assert self.trie.num_exact(replica, hints) == self._depth(self.exact[replica], hints)

    @invariant()
    def what_lies_in_pools_is_found_too(self) -> None:
        for hints in self.asked:
            found = self.trie.match_pools(hints)
            for replica, hosted in self.hosted.items():
                assert self.trie.host_digest(replica) == digest_of(hosted)
                in_pool = self._depth(self.exact[replica] - hosted, hints)
                predicted = [
                    self._depth(set(chain), hints) for chain, _ in self.predictions[replica].values()
                ]
                if replica in found:
                    assert found[replica] == max([in_pool, *predicted])
                else:
                    assert not hosted

    @invariant()
    def digests_and_sizes_are_exact(self) -> None:
        for replica, exact in self.exact.items():
            assert self.trie.digest(replica) == digest_of(exact)
            assert self.trie.num_blocks(replica) == len(exact)
        held = len(set().union(*map(self._held, self.exact)))
        # A table of many segments is swept of a replica that left over several calls.
        assert self.trie.num_entries == held or (self.trie.is_sweeping and self.trie.num_entries > held)

    def teardown(self) -> None:
        for replica in REPLICAS:
            self.trie.remove_replica(replica)
        for _ in range(self.trie._table.num_segments):
            self.trie.expire(self.now)
        assert not self.trie.is_sweeping
        assert self.trie.num_entries == 0

    def _learn(self, path: tuple[int, ...]) -> list[HashHint]:
        hints = hints_of(path)
        for parent, child in pairwise(hints):
            self.children.setdefault(parent, set()).add(child)
        if hints not in self.asked:
            self.asked = [*self.asked[-7:], hints]
        return hints

    def _with_descendants(self, hint: HashHint) -> set[HashHint]:
        found, todo = set(), [hint]
        while todo:
            found.add(todo[-1])
            todo.extend(self.children.get(todo.pop(), ()))
        return found

    def _confirm(self, replica: ReplicaId) -> None:
        live = self.predictions[replica]
        for last in [last for last in live if last in self.exact[replica]]:
            del live[last]

    def _held(self, replica: ReplicaId) -> set[HashHint]:
        return self.exact[replica].union(*(chain for chain, _ in self.predictions[replica].values()))

    def _depth(self, held: set[HashHint], hints: list[HashHint]) -> int:
        return next((i for i, hint in enumerate(hints) if hint not in held), len(hints))

    def _walk(self, hints: list[HashHint]) -> dict[ReplicaId, int]:
        found = {}
        for replica in self.exact:
            depth = self._depth(self._held(replica), hints)
            if depth:
                found[replica] = depth
        return found


class WideIndexMachine(IndexMachine):
    """The same, where the table splits and merges all the time and the replicas' numbers straddle 64."""

    @initialize(secrets=st.randoms(use_true_random=False))
    def tiny_segments(self, secrets: random.Random) -> None:
        table = PackedTable(1 << 16, segment_bits=4, rng=random.Random(secrets.getrandbits(64)))
        self.trie._table = table
        self.trie._departed = Departed(table, self.trie._predictions, self.trie._members)
        for index in range(62):
            self.trie.add_replica(ReplicaId(f"idle{index}"))


STEPS = settings(max_examples=60, stateful_step_count=40)
IndexMachine.TestCase.settings = WideIndexMachine.TestCase.settings = STEPS
TestIndex = IndexMachine.TestCase
TestWideIndex = WideIndexMachine.TestCase
