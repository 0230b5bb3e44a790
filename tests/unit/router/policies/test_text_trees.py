"""Policies with a tree of characters: SGLang's and Ray's."""

from __future__ import annotations

import pytest

from tests.fakes.policies import Bench, busy, candidates, of_blocks, of_text
from tests.fakes.router import hint_chain

ABC = candidates("abc")
COOK = "You are a cook. What goes well with fennel?"


# --- SGLang ----------------------------------------------------------------------------------------


def test_sglang_goes_where_more_than_three_tenths_are_known() -> None:
    bench = Bench("sglang_cache_aware")
    bench.sent("b", of_text("x" * 30))
    assert bench.choice(ABC, of_text("x" * 30 + "y" * 69)) == "b"  # 30 of 99
    assert bench.choice(ABC, of_text("x" * 30 + "y" * 70)) == "a"  # 30 of 100: not more


def test_sglang_takes_who_was_last_sent_the_prefix() -> None:
    bench = Bench("sglang_cache_aware")
    bench.sent("b", of_text(COOK))
    bench.sent("c", of_text(COOK))
    assert bench.choice(ABC, of_text(COOK)) == "c"


def test_sglang_below_the_threshold_takes_the_least_loaded_the_first_of_equals() -> None:
    bench = Bench("sglang_cache_aware")
    assert bench.choice([busy("a", 2), busy("b", 1), busy("c", 1)], of_text(COOK)) == "b"


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ((64, 0, 0), "a"),  # 64 apart: not more than 64
        ((65, 0, 0), "b"),  # 65 apart, and 65 > 1.5 * 0
        ((600, 400, 400), "a"),  # 200 apart, but 600 = 1.5 * 400
        ((601, 400, 401), "b"),  # 601 > 600
    ],
)
def test_sglang_balances_when_load_is_uneven_by_both_measures(
    loads: tuple[int, int, int], chosen: str
) -> None:
    bench = Bench("sglang_cache_aware")
    bench.sent("a", of_text(COOK))
    among = [busy(replica, load) for replica, load in zip("abc", loads, strict=True)]
    assert bench.choice(among, of_text(COOK)) == chosen


def test_sglang_passes_over_a_holder_that_cannot_be_chosen_for_the_first_that_can() -> None:
    bench = Bench("sglang_cache_aware")
    bench.sent("c", of_text(COOK))
    assert bench.choice([busy("a", 5), busy("b", 0)], of_text(COOK)) == "a"


def test_sglang_forgets_the_least_recently_used_text() -> None:
    bench = Bench("sglang_cache_aware", options={"max_tree_chars": 250})
    for letter in "xyz":
        bench.sent("b", of_text(letter * 100))
    assert bench.choice(ABC, of_text("z" * 100)) == "b"
    assert bench.choice(ABC, of_text("x" * 100)) == "a"


def test_blocks_stand_for_their_characters() -> None:
    """3 of 6 blocks are half of 384 characters; with 4 tokens more the half is not reached."""
    bench = Bench("sglang_cache_aware", options={"cache_threshold": 0.5})
    known = hint_chain("doc", 4)
    bench.sent("b", of_blocks(known))
    assert bench.choice(ABC, of_blocks([*known, *hint_chain("q", 3)])) == "b"
    assert bench.choice(ABC, of_blocks([*known, *hint_chain("q", 3)], extra_tokens=15)) == "b"
    assert bench.choice(ABC, of_blocks([*known, *hint_chain("q", 4)])) == "a"


# --- Ray -------------------------------------------------------------------------------------------


def test_ray_takes_the_shortest_queue_of_all_who_hold_the_longest_match() -> None:
    bench = Bench("ray_prefix_affinity")
    bench.sent("b", of_text(COOK))
    bench.sent("c", of_text(COOK))
    assert bench.choice([busy("a", 0), busy("b", 7), busy("c", 5)], of_text(COOK)) == "c"


def test_ray_never_balances_by_default_and_does_when_told_from_when() -> None:
    among = [busy("a", 500), busy("b", 0), busy("c", 0)]
    default = Bench("ray_prefix_affinity")
    default.sent("a", of_text(COOK))
    assert default.choice(among, of_text(COOK)) == "a"
    told = Bench("ray_prefix_affinity", options={"imbalanced_threshold": 10.0})
    told.sent("a", of_text(COOK))
    assert set(told.choices(among, of_text(COOK))) == {"b", "c"}


def test_ray_sends_what_is_hardly_known_to_who_was_sent_least_text() -> None:
    bench = Bench("ray_prefix_affinity")
    bench.sent("a", of_text("x" * 10))
    bench.sent("b", of_text("y" * 30))
    bench.sent("c", of_text("z" * 20))
    assert bench.choice([busy("a", 9), busy("b", 0), busy("c", 0)], of_text("x" * 9 + "w" * 91)) == "a"
    assert bench.choice(ABC, of_text("y" * 10 + "w" * 90)) == "b"  # a tenth is enough


def test_ray_evicts_from_its_threshold_to_its_target_when_told_to() -> None:
    options = {"do_eviction": True, "eviction_threshold_chars": 250, "eviction_target_chars": 150}
    bench = Bench("ray_prefix_affinity", options=options)
    bench.sent("a", of_text("u" * 60))
    bench.sent("c", of_text("v" * 70))
    for letter in "xyz":  # 300 characters: cut to 150, so one of a hundred is left
        bench.sent("b", of_text(letter * 100))
    assert bench.choice(ABC, of_text("z" * 100)) == "b"
    assert bench.choice(ABC, of_text("y" * 100)) == "a"
    keeps = Bench("ray_prefix_affinity")
    keeps.sent("a", of_text("u" * 60))
    for letter in "xyz":
        keeps.sent("b", of_text(letter * 100))
    assert keeps.choice(ABC, of_text("x" * 100)) == "b"
