"""Policies that hash something of the prompt onto a ring."""

from __future__ import annotations

from collections import Counter

from cache.types import HashHint
from router.policies.indexes.hash_ring import HashRing, position
from router.policies.prodstack_simhash import simhash
from tests.fakes.policies import Bench, busy, candidate, candidates, cold, of_blocks, of_text
from tests.fakes.router import hint_chain

ABCD = candidates("abcd")


def ring_order(key: str, num_points: int, replicas: str = "abcd") -> list[str]:
    ring = HashRing(num_points)
    for replica in replicas:
        ring.add(candidate(replica).replica_id)
    return list(ring.walk(position(key)))


# --- session affinity ----------------------------------------------------------------------------


def test_a_session_stays_where_it_is_whatever_its_prompts_and_the_load() -> None:
    bench = Bench("session_affinity", "abcd")
    home = ring_order("s1", 160)[0]
    for index in range(20):
        among = [busy(replica, 50 if replica == home else 0) for replica in "abcd"]
        assert bench.place(among, of_text(f"prompt {index}", session="s1")) == home


def test_a_session_whose_replica_is_not_there_moves_to_the_next_on_the_ring() -> None:
    bench = Bench("session_affinity", "abcd")
    first, second, *_ = ring_order("s1", 160)
    without = [c for c in ABCD if c.replica_id != first]
    assert bench.choice(without, of_text("p", session="s1")) == second
    assert bench.choice(ABCD, of_text("p", session="s1")) == first


def test_sessions_are_shared_out() -> None:
    bench = Bench("session_affinity", "abcd")
    homes = Counter(bench.choice(ABCD, of_text("p", session=f"s{i}")) for i in range(800))
    assert min(homes.values()) > 120


def test_without_a_session_the_lowest_rate_of_the_last_minute_is_chosen() -> None:
    bench = Bench("session_affinity", "abc")
    for replica in "aab":
        bench.sent(replica, cold("p"))
    assert bench.choice(candidates("abc"), cold("p")) == "c"
    bench.clock.advance(61.0)  # all forgotten: the first again, as all rates are equal
    assert bench.choice(candidates("abc"), cold("p")) == "a"


# --- consistent hashing with bounded loads ---------------------------------------------------------


def test_chwbl_takes_the_first_of_the_ring_while_it_is_within_the_bound() -> None:
    """Nothing in flight: no bound. 7 + 1 in flight on 4 replicas: at most 8 / 4 * 1.25 = 2.5 each."""
    bench = Bench("chwbl", "abcd")
    order = ring_order("hello", 256)
    assert bench.choice(ABCD, of_text("hello")) == order[0]
    loads = dict(zip(order, (2, 5, 0, 0), strict=True))
    assert bench.choice([busy(r, loads[r]) for r in "abcd"], of_text("hello")) == order[0]


def test_chwbl_walks_on_past_those_above_the_bound() -> None:
    """9 in flight: at most 10 / 4 * 1.25 = 3.125, so 4 and 5 are too many."""
    bench = Bench("chwbl", "abcd")
    order = ring_order("hello", 256)
    loads = dict(zip(order, (4, 5, 0, 0), strict=True))
    assert bench.choice([busy(r, loads[r]) for r in "abcd"], of_text("hello")) == order[2]


def test_chwbl_sees_the_first_hundred_characters_only() -> None:
    bench = Bench("chwbl", "abcd")
    head = "x" * 100
    homes = {bench.choice(ABCD, of_text(head + str(index))) for index in range(50)}
    assert homes == {ring_order(head, 256)[0]}
    assert len({bench.choice(ABCD, of_text(f"{index}{head}")) for index in range(50)}) == 4


def test_chwbl_of_blocks_skips_what_most_prompts_begin_with() -> None:
    """A system prompt of two blocks, then conversations: each keeps its place as it grows."""
    bench = Bench("chwbl", "abcd")
    system = hint_chain("system", 2)
    for index in range(30):
        bench.sent("a", of_blocks([*system, *hint_chain(f"c{index}", 3)]))
    homes = [
        {bench.choice(ABCD, of_blocks([*system, *hint_chain(f"d{index}", turns)])) for turns in range(1, 6)}
        for index in range(40)
    ]
    assert all(len(home) == 1 for home in homes)
    assert len(set().union(*homes)) == 4


# --- similarity hash -------------------------------------------------------------------------------


def test_simhash_takes_the_majority_of_each_bit() -> None:
    features = [HashHint(0b0111), HashHint(0b0011), HashHint(0b1001)]
    assert simhash(features) == 0b0011
    assert simhash([HashHint(0b01), HashHint(0b10)]) == 0  # ties are zeros
    assert simhash([HashHint(2**64 - 1)]) == 2**64 - 1


def test_prompts_mostly_alike_stay_together_and_others_spread() -> None:
    bench = Bench("prodstack_simhash", "abcd")
    together = 0
    for index in range(60):
        long = hint_chain(f"doc{index}", 200)
        home = bench.choice(ABCD, of_blocks(long))
        together += bench.choice(ABCD, of_blocks([*long, *hint_chain("question", 2)])) == home
    assert together >= 50
    assert len({bench.choice(ABCD, of_blocks(hint_chain(f"doc{i}", 200))) for i in range(60)}) == 4


def test_simhash_looks_at_no_load() -> None:
    bench = Bench("prodstack_simhash", "abcd")
    prompt = of_blocks(hint_chain("doc", 20))
    home = bench.choice(ABCD, prompt)
    assert bench.choice([busy(r, 500 if r == home else 0) for r in "abcd"], prompt) == home
