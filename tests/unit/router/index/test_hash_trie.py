"""The index, case by case; its laws are in `tests/property/test_hash_trie.py`."""

from __future__ import annotations

import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from cache.events import Digest, digest_of
from router.index.hash_trie import HashTrie
from tests.fakes.router import hint_chain, replica_id, spread

A, B, C = replica_id(0), replica_id(1), replica_id(2)


def a_trie() -> HashTrie:
    trie = HashTrie()
    for replica in (A, B, C):
        trie.add_replica(replica)
    return trie


def test_each_replica_is_matched_to_its_own_depth() -> None:
    trie, prompt = a_trie(), hint_chain("p", 100)
    trie.store(A, prompt[:7])
    trie.store(B, prompt)
    trie.store(C, prompt[:1])
    assert trie.match(prompt) == {A: 7, B: 100, C: 1}
    assert trie.match(prompt[:5]) == {A: 5, B: 5, C: 1}
    assert trie.match([]) == {}
    assert trie.match(hint_chain("other", 3)) == {}


def test_a_removal_before_its_store_does_not_resurrect_or_linger() -> None:
    trie, prompt = a_trie(), hint_chain("p", 3)
    trie.remove(A, prompt)
    assert trie.num_entries == 0
    trie.store(A, prompt)
    trie.remove(A, prompt)
    assert trie.match(prompt) == {}
    assert trie.digest(A) == Digest()
    assert trie.num_entries == 0


def test_storing_twice_counts_once() -> None:
    trie, prompt = a_trie(), hint_chain("p", 3)
    trie.store(A, prompt)
    before = trie.digest(A)
    trie.store(A, prompt)
    assert trie.digest(A) == before == Digest(3, prompt[0] ^ prompt[1] ^ prompt[2])


def test_a_hint_that_is_named_twice_ends_its_prediction_once() -> None:
    """No batch does, and a snapshot may: nobody has looked before it is applied."""
    trie, [hint] = a_trie(), hint_chain("p", 1)
    for name in ("p", "q", "r"):
        trie.predict(A, hint_chain(name, 1), 10.0)
    trie.store(A, [hint, hint])
    assert trie.num_exact(A, [hint]) == 1
    assert trie.digest(A) == digest_of([hint])


@pytest.mark.parametrize("size", [5, 50])
def test_hints_may_come_packed_or_not(size: int) -> None:
    """Events bring tuples, snapshots arrays and views of what was received."""
    prompt = hint_chain("p", size)
    packed = array("Q", prompt)
    for hints in (prompt, tuple(prompt), packed, memoryview(packed), iter(prompt), set(prompt)):
        trie = a_trie()
        trie.store(A, hints)  # type: ignore[arg-type]
        assert trie.match(prompt) == {A: size}
        trie.remove(A, packed[2:])  # type: ignore[arg-type]
        trie.predict(A, memoryview(packed), expires_at=1.0)  # type: ignore[arg-type]
        assert trie.match(memoryview(packed)) == {A: size}  # type: ignore[arg-type]
        trie.replace(A, memoryview(packed))  # type: ignore[arg-type]
        assert trie.digest(A) == digest_of(prompt)


def test_a_snapshot_replaces_what_was_known() -> None:
    trie, old, new = a_trie(), hint_chain("old", 4), hint_chain("new", 5)
    trie.store(A, old)
    trie.store(B, old)
    trie.replace(A, [*old[:2], *new])
    assert trie.match(old) == {A: 2, B: 4}
    assert trie.match(new) == {A: 5}


def test_a_prediction_holds_until_it_expires() -> None:
    trie, prompt = a_trie(), hint_chain("p", 6)
    trie.predict(A, prompt, expires_at=5.0)
    trie.expire(4.9)
    assert trie.match(prompt) == {A: 6}
    trie.expire(5.0)
    assert trie.match(prompt) == {}
    assert trie.num_entries == 0


def test_a_confirmed_prediction_outlives_its_expiry() -> None:
    trie, prompt = a_trie(), hint_chain("p", 6)
    trie.predict(A, prompt, expires_at=5.0)
    trie.store(A, prompt)
    trie.expire(100.0)
    assert trie.match(prompt) == {A: 6}


def test_a_confirmed_prediction_does_not_outlive_an_eviction() -> None:
    """Once the engine has reported the whole prompt, its word is final."""
    trie, prompt = a_trie(), hint_chain("p", 6)
    trie.predict(A, prompt, expires_at=5.0)
    trie.store(A, prompt)
    trie.remove(A, prompt[4:])
    assert trie.match(prompt) == {A: 4}


def test_an_eviction_before_the_prompt_is_computed_leaves_the_prediction() -> None:
    """The prompt was routed for blocks that are then evicted: it will compute them again."""
    trie, prompt = a_trie(), hint_chain("p", 6)
    trie.store(A, prompt[:4])
    trie.predict(A, prompt, expires_at=5.0)
    trie.remove(A, prompt[2:4])
    assert trie.match(prompt) == {A: 6}
    trie.expire(5.0)
    assert trie.match(prompt) == {A: 2}


def test_a_twin_renews_a_prediction_instead_of_adding_one() -> None:
    trie, prompt = a_trie(), hint_chain("p", 6)
    trie.predict(A, prompt, expires_at=5.0)
    trie.predict(A, prompt, expires_at=7.0)
    trie.expire(5.0)
    assert trie.match(prompt) == {A: 6}
    trie.expire(7.0)
    assert trie.num_entries == 0


def test_a_shared_prefix_stays_while_any_prediction_covers_it() -> None:
    trie, short = a_trie(), hint_chain("p", 3)
    long = [*short, *hint_chain("q", 3)]
    trie.predict(A, long, expires_at=5.0)
    trie.predict(A, short, expires_at=8.0)
    trie.expire(5.0)
    assert trie.match(long) == {A: 3}


def test_predictions_are_bounded_and_the_oldest_ends_first() -> None:
    trie = HashTrie(max_predicted_blocks=10)
    trie.add_replica(A)
    first, second = hint_chain("first", 6), hint_chain("second", 6)
    trie.predict(A, first, expires_at=5.0)
    trie.predict(A, second, expires_at=5.0)
    assert trie.match(first) == {}
    assert trie.match(second) == {A: 6}
    trie.predict(A, hint_chain("huge", 11), expires_at=5.0)
    assert trie.num_entries == 0


def test_a_replica_that_leaves_takes_everything_with_it() -> None:
    trie, prompt = a_trie(), hint_chain("p", 6)
    trie.store(A, prompt[:3])
    trie.store(B, prompt[:2])
    trie.predict(A, prompt, expires_at=5.0)
    trie.remove_replica(A)
    trie.remove_replica(A)
    assert trie.match(prompt) == {B: 2}
    assert trie.num_entries == 2
    trie.expire(100.0)


def test_a_thousand_replicas_come_and_go_and_nothing_stays() -> None:
    trie = HashTrie()
    trie.add_replica(B)
    for index in range(1000):
        newcomer = replica_id(index + 10)
        prompt = hint_chain(f"p{index}", 4)
        trie.add_replica(newcomer)
        trie.store(newcomer, prompt[:2])
        trie.predict(newcomer, prompt, expires_at=1e9)
        assert trie.match(prompt) == {newcomer: 4}
        trie.remove_replica(newcomer)
    assert trie.num_entries == 0
    # Numbers are given out again: the table stays as narrow as the fleet.
    assert trie._members.num_numbers == 2


def test_exact_blocks_are_counted_as_they_are_now() -> None:
    """Right after a match the answer is at hand; it must not outlive what it says."""
    trie, prompt = a_trie(), hint_chain("p", 40)
    trie.store(A, prompt[:10])
    trie.predict(A, prompt, expires_at=5.0)
    assert trie.num_exact(A, prompt) == 10
    assert trie.match(prompt) == {A: 40}
    assert (trie.num_exact(A, prompt), trie.num_exact(B, prompt)) == (10, 0)
    trie.store(A, prompt[10:20])
    assert trie.num_exact(A, prompt) == 20
    trie.match(prompt)
    trie.remove(A, prompt[5:20])
    assert trie.num_exact(A, prompt) == 5
    trie.match(prompt)
    trie.replace(A, prompt[:2])
    assert trie.num_exact(A, prompt) == 2
    trie.match(prompt)
    trie.remove_replica(A)
    trie.add_replica(A)
    assert (trie.num_exact(A, prompt), trie.num_exact(A, [])) == (0, 0)


def test_what_is_swept_later_matches_nobody_now() -> None:
    """A large index is swept over many calls; the replica is gone from the first moment."""
    trie, prompt = a_trie(), hint_chain("p", 300)
    trie.store(A, spread(150_000))
    trie.store(A, prompt)
    trie.store(B, prompt[:100])
    trie.remove_replica(A)
    assert trie.is_sweeping
    assert trie.match(prompt) == {B: 100}
    trie.add_replica(A)
    assert trie.match(prompt) == {B: 100}
    for _ in range(100):
        trie.expire(0.0)
    assert not trie.is_sweeping
    assert trie.num_entries == 100
    assert trie.match(prompt) == {B: 100}


def test_more_replicas_than_bits_in_a_word() -> None:
    trie, prompt = HashTrie(), hint_chain("p", 200)
    fleet = [replica_id(index) for index in range(150)]
    for index, replica in enumerate(fleet):
        trie.add_replica(replica)
        trie.store(replica, prompt[: index + 1])
    assert trie.match(prompt) == {replica: index + 1 for index, replica in enumerate(fleet)}
    wide = trie.num_bytes()
    for replica in fleet[10:]:
        trie.remove_replica(replica)
    assert trie.match(prompt) == {replica: index + 1 for index, replica in enumerate(fleet[:10])}
    assert trie.num_bytes() < 0.6 * wide, "the words of those who left are given back"


def test_the_first_word_of_a_replica_beyond_a_word_may_be_of_host_memory() -> None:
    """What was stored and demoted within one batch is told as hosted alone, and before what is stored."""
    trie = HashTrie()
    for i in range(65):
        trie.add_replica(replica_id(i))
    last, hints = replica_id(64), hint_chain("p", 3)
    trie.host(last, hints)
    assert trie.match(hints) == {last: 3}
    assert trie.match_pools(hints) == {last: 0}
    assert trie.host_digest(last) == trie.digest(last) == digest_of(hints)


def test_the_cap_holds_and_the_digest_is_still_the_replicas() -> None:
    """Else a replica beyond the cap would be asked for its snapshot again and again."""
    trie = HashTrie(max_blocks=100)
    trie.add_replica(A)
    first, second = hint_chain("first", 80), hint_chain("second", 80)
    trie.store(A, first)
    trie.store(A, second)
    assert trie.num_entries == 100
    assert (trie.num_blocks(A), trie.num_refused) == (100, 60)
    assert trie.match(second) == {A: 20}, "the beginning is kept"
    assert trie.digest(A) == digest_of([*first, *second])
    trie.remove(A, second[10:])
    assert trie.digest(A) == digest_of([*first, *second[:10]])
    assert trie.num_refused == 0
    trie.replace(A, [*first, *second])
    assert trie.digest(A) == digest_of([*first, *second])
    assert trie.num_entries == 100


def test_beyond_the_cap_nothing_is_told_of_tiers() -> None:
    """Who has no room for a block cannot tell whether it comes or only changes tiers: no digest is better
    than one that differs for ever."""
    trie = HashTrie(max_blocks=100)
    trie.add_replica(A)
    trie.store(A, hint_chain("p", 160))
    assert trie.digest(A) == digest_of(hint_chain("p", 160))
    trie.host(A, hint_chain("p", 160)[150:])
    assert trie.digest(A) is None
    assert trie.host_digest(A) is None
    trie.believe(A, digest_of(hint_chain("p", 160)))
    assert (trie.num_blocks(A), trie.num_refused) == (100, 60)
    trie.replace(A, hint_chain("p", 80), hint_chain("p", 80)[70:])
    assert trie.digest(A) == digest_of(hint_chain("p", 80))
    assert trie.host_digest(A) == digest_of(hint_chain("p", 80)[70:])


def test_unique_prompts_leave_memory_flat() -> None:
    """Ghosts of evicted blocks must not pile up: an engine's whole life is blocks it has never seen."""
    trie = a_trie()
    numbers = iter(spread(400_000))
    held = [[next(numbers) for _ in range(500)] for _ in range(40)]
    for chain in held:
        trie.store(A, chain)
    before = trie.num_bytes()
    for turn in range(700):
        trie.remove(A, held.pop(0))
        held.append([next(numbers) for _ in range(500)])
        trie.predict(B, held[-1], expires_at=turn + 3.0)
        trie.store(A, held[-1])
        trie.expire(float(turn))
    trie.expire(1e9)
    assert trie.num_entries == 20_000
    assert trie.num_bytes() <= 1.1 * before


def test_an_index_that_empties_gives_its_memory_back() -> None:
    trie, blocks = a_trie(), spread(100_000)
    empty = trie.num_bytes()
    trie.store(A, blocks)
    assert trie.num_bytes() > 10 * empty
    for start in range(0, len(blocks), 500):
        trie.remove(A, blocks[start : start + 500])
    assert trie.num_bytes() < 2 * empty


def test_a_hot_prefix_stays_one_path_whatever_branched_off_it() -> None:
    """Or it would end as one node per block, and every match would walk all of them."""
    trie, hot = a_trie(), hint_chain("hot", 200)
    trie.predict(A, hot, expires_at=1000.0)
    for depth in range(1, 199):
        trie.predict(A, [*hot[:depth], *hint_chain(f"tail {depth}", 3)], expires_at=1000.0)
    for depth in range(1, 199):
        trie.retract(A, [*hot[:depth], *hint_chain(f"tail {depth}", 3)])
    assert trie.match(hot) == {A: 200}
    assert trie._predictions._tree.num_nodes == 1


GROWTH = """
import ctypes, gc, random, resource, sys
from router.index.hash_trie import HashTrie

def resident() -> int:
    gc.collect()
    _, resident, of_files, *_ = map(int, open("/proc/self/statm").read().split())
    return (resident - of_files) * resource.getpagesize()  # pages of files come and go with need

def fill(trie, replicas, blocks, prompts, seed):
    rng = random.Random(seed)
    for name in range(replicas):
        trie.add_replica(str(name))
        for _ in range(0, blocks, 1000):
            trie.store(str(name), [rng.getrandbits(64) for _ in range(1000)])
        for prompt in range(prompts):
            trie.predict(str(name), [rng.getrandbits(64) for _ in range(100)], 1.0)

replicas, blocks, prompts = map(int, sys.argv[1:])
fill(HashTrie(), 1, 2000, 10, 0)  # what is allocated once, and the allocator's own reserves
gc.collect()
if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
    trim(0)  # what compiling imported modules has left free would be used again, and hide growth
trie, before = HashTrie(), resident()
fill(trie, replicas, blocks, prompts, 1)
print(resident() - before, trie.num_bytes())
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own account of a process")
@pytest.mark.parametrize(
    ("replicas", "blocks", "prompts"), [(4, 100_000, 0), (70, 4_000, 0), (4, 20_000, 3000)]
)
def test_the_byte_gauge_is_what_the_process_grows_by(replicas: int, blocks: int, prompts: int) -> None:
    """In a process of its own: another test's freed memory would be counted as ours, or hide it."""
    command = [sys.executable, "-c", GROWTH, str(replicas), str(blocks), str(prompts)]
    root = Path(__file__).parents[4]
    answer = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    growth, gauge = map(int, answer.split())
    assert 0.9 * growth < gauge < 1.1 * growth
