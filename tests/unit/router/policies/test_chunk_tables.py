"""Policies with a table of chunks: production-stack's, AIBrix's and the Gateway API extension's.

A block is 16 tokens, 64 characters; a chunk of 128 characters is two blocks.
"""

from __future__ import annotations

import pytest

from tests.fakes.policies import Bench, busy, candidate, candidates, cold, of_blocks
from tests.fakes.router import hint_chain

ABC = candidates("abc")
DOC = hint_chain("doc", 8)


# --- production-stack, prefix aware ----------------------------------------------------------------


def test_prodstack_draws_among_the_holders_of_the_longest_match_whatever_their_load() -> None:
    bench = Bench("prodstack_prefix")
    bench.sent("a", of_blocks(DOC[:4]))
    bench.sent("b", of_blocks(DOC))
    bench.sent("c", of_blocks(DOC))
    drawn = bench.choices([busy("a", 0), busy("b", 90), busy("c", 0)], of_blocks(DOC))
    assert set(drawn) == {"b", "c"}
    assert min(drawn.values()) > 60


def test_prodstack_takes_any_match_at_all_and_draws_without_one() -> None:
    bench = Bench("prodstack_prefix")
    bench.sent("b", of_blocks(DOC[:2]))
    assert set(bench.choices(ABC, of_blocks([*DOC[:2], *hint_chain("other", 60)]))) == {"b"}
    assert set(bench.choices(ABC, cold("p"))) == {"a", "b", "c"}


def test_prodstack_below_its_least_match_takes_the_lowest_rate() -> None:
    bench = Bench("prodstack_prefix", options={"prefix_min_match_length": 256})
    bench.sent("b", of_blocks(DOC[:2]))
    bench.sent("a", cold("p"))
    assert set(bench.choices(ABC, of_blocks(DOC))) == {"c"}  # 128 characters are too few
    bench.sent("b", of_blocks(DOC[:4]))
    assert set(bench.choices(ABC, of_blocks(DOC))) == {"b"}


def test_prodstack_counts_whole_chunks() -> None:
    bench = Bench("prodstack_prefix")
    bench.sent("b", of_blocks(DOC[:3]))
    bench.sent("c", of_blocks(DOC[:2]))
    assert set(bench.choices(ABC, of_blocks(DOC))) == {"b", "c"}  # the third block is half a chunk


# --- AIBrix ----------------------------------------------------------------------------------------


def test_aibrix_takes_the_longest_match() -> None:
    bench = Bench("aibrix_prefix")
    bench.sent("a", of_blocks(DOC[:4]))
    bench.sent("b", of_blocks(DOC))
    assert bench.choice([busy("a", 2), busy("b", 2), busy("c", 0)], of_blocks(DOC)) == "b"


def test_aibrix_passes_over_a_holder_far_above_the_mean() -> None:
    """Loads 8, 1, 0: mean 3, deviation sqrt(38 / 2) = 4.36, so up to 7.36: b's half is taken, not a's all."""
    bench = Bench("aibrix_prefix")
    bench.sent("a", of_blocks(DOC))
    bench.sent("b", of_blocks(DOC[:4]))
    assert bench.choice([busy("a", 8), busy("b", 1), busy("c", 0)], of_blocks(DOC)) == "b"
    # Two deviations, as its documentation has it: up to 11.7
    lenient = Bench("aibrix_prefix", options={"standard_deviation_factor": 2.0})
    lenient.sent("a", of_blocks(DOC))
    assert lenient.choice([busy("a", 8), busy("b", 1), busy("c", 0)], of_blocks(DOC)) == "a"


def test_aibrix_deviates_as_a_sample_does() -> None:
    """Loads 6, 4, 0: mean 3.33, deviation sqrt(18.7 / 2) = 3.06 (over all three it would be 2.49)."""
    bench = Bench("aibrix_prefix")
    bench.sent("a", of_blocks(DOC))
    assert bench.choice([busy("a", 6), busy("b", 4), busy("c", 0)], of_blocks(DOC)) == "a"
    alone = Bench("aibrix_prefix", "a")
    assert alone.choice([busy("a", 6)], of_blocks(DOC)) == "a"


@pytest.mark.parametrize(("most", "chosen"), [(8, "b"), (9, "c")])
def test_aibrix_restricts_to_the_least_loaded_beyond_eight_requests_apart(most: int, chosen: str) -> None:
    bench = Bench("aibrix_prefix")
    bench.sent("b", of_blocks(DOC))
    assert bench.choice([busy("a", most), busy("b", 1), busy("c", 0)], of_blocks(DOC)) == chosen


def test_aibrix_without_a_match_draws_among_the_least_loaded() -> None:
    drawn = Bench("aibrix_prefix").choices([busy("a", 0), busy("b", 1), busy("c", 0)], cold("p"))
    assert set(drawn) == {"a", "c"}


def test_aibrix_forgets_after_twenty_minutes() -> None:
    bench = Bench("aibrix_prefix")
    bench.sent("b", of_blocks(DOC))
    bench.clock.advance(1200.0)
    assert set(bench.choices(ABC, of_blocks(DOC))) == {"b"}
    bench.clock.advance(0.1)
    assert len(set(bench.choices(ABC, of_blocks(DOC)))) == 3


def test_aibrix_counts_large_blocks_as_the_chunks_they_are() -> None:
    """Blocks of 512 tokens are 16 chunks each: 40 chunks hold two of them."""
    bench = Bench("aibrix_prefix", options={"max_chunks": 40}, block_size=512)
    bench.sent("b", of_blocks(DOC[:2]))
    assert set(bench.choices(ABC, of_blocks(DOC[:2]))) == {"b"}
    bench.sent("c", cold("p", 1))
    bench.sent("c", cold("q", 1))
    assert len(set(bench.choices(ABC, of_blocks(DOC[:2])))) == 3


# --- Gateway API Inference Extension ---------------------------------------------------------------


def test_gie_adds_three_weighted_scores() -> None:
    """All of 8 blocks held by b. Queues 4, 2, 0: scores 0, 0.5, 1. Used 0.5, 0.25, 0: 0.5, 0.75, 1.
    a: 2 * 0 + 2 * 0.5 = 1; b: 2 * 0.5 + 2 * 0.75 + 3 * 1 = 5.5; c: 2 + 2 = 4."""
    bench = Bench("gie_epp")
    bench.sent("b", of_blocks(DOC))
    among = [
        candidate("a", num_waiting=4, used_fraction=0.5),
        candidate("b", num_waiting=2, used_fraction=0.25),
        candidate("c"),
    ]
    ranked = bench.rank(among, of_blocks(DOC))
    assert [(scored.replica_id, scored.cost) for scored in ranked] == [("b", -5.5), ("c", -4.0), ("a", -1.0)]


def test_gie_gives_up_a_hit_for_an_empty_queue_beyond_its_weights() -> None:
    """A quarter held is 0.75: less than the 2 of a queue that is the longest against one that is empty."""
    bench = Bench("gie_epp")
    bench.sent("a", of_blocks(DOC[:2]))
    assert bench.choice([candidate("a", num_waiting=1), candidate("b")], of_blocks(DOC)) == "b"


def test_gie_looks_at_256_blocks_of_16_tokens() -> None:
    long = hint_chain("long", 300)
    bench = Bench("gie_epp")
    bench.sent("b", of_blocks(long))
    ranked = bench.rank(ABC, of_blocks(long))
    assert ranked[0].cost == -7.0  # all of what it looks at
    other_tail = of_blocks([*long[:256], *hint_chain("tail", 44)])
    assert bench.rank(ABC, other_tail)[0].cost == -7.0
    large = Bench("gie_epp", block_size=512)  # of which that is 8
    large.sent("b", of_blocks(long[:20]))
    assert large.rank(ABC, of_blocks([*long[:8], *hint_chain("tail", 12)]))[0].cost == -7.0


def test_gie_forgets_as_the_engine_would() -> None:
    bench = Bench("gie_epp", num_blocks=8)
    bench.sent("b", of_blocks(DOC))
    bench.sent("b", cold("p", 4))
    ranked = bench.rank(ABC, of_blocks(DOC))
    assert (ranked[0].replica_id, ranked[0].cost) == ("b", -4.0 - 3 * 4 / 8)
