"""The pure parts of an open loop: distributions, prompts, stretches of a trace, ceilings, tallies."""

from __future__ import annotations

import math
import random
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client.answer import Answer, Failure
from loadtest.comparison.load import Load
from loadtest.open_loop.ceiling import infinite_cache_hit_ratio
from loadtest.open_loop.histogram import Histogram
from loadtest.open_loop.prompts import FIRST_TOKEN, LAST_TOKEN, TextPrompts, TokenPrompts
from loadtest.open_loop.schedule import Stretch, schedule, shortened
from loadtest.open_loop.tally import Tally, Targets
from loadtest.workloads.errors import WorkloadError
from loadtest.workloads.generator_source import GeneratorSource
from loadtest.workloads.generators import GENERATORS, make_generator
from loadtest.workloads.request import Workload, WorkRequest

SECONDS = st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=200)


@given(SECONDS, st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_quantiles_are_within_a_percent(values: list[float], share: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    assert histogram.quantile_s(share) == pytest.approx(exact, rel=0.01)
    assert histogram.mean_s == pytest.approx(sum(values) / len(values))
    assert histogram.curve()[-1][1] == 1.0


@given(SECONDS, SECONDS)
def test_histograms_add_up(some: list[float], others: list[float]) -> None:
    one, other, both = Histogram(), Histogram(), Histogram()
    for value in some:
        one.add(value)
        both.add(value)
    for value in others:
        other.add(value)
        both.add(value)
    one.merge(other)
    assert one.buckets == both.buckets
    assert one.largest_s == both.largest_s


def test_an_empty_histogram_has_no_quantile() -> None:
    assert math.isnan(Histogram().quantile_s(0.99))
    assert math.isnan(Histogram().mean_s)


def request(
    at_s: float, blocks: tuple[int, ...], *, tokens: int | None = None, output: int = 4, session: int = 0
) -> WorkRequest:
    return WorkRequest(at_s, 8 * len(blocks) if tokens is None else tokens, output, blocks, session)


@pytest.mark.parametrize("kind", ["tokens", "text"])
def test_prompts_are_equal_exactly_as_far_as_their_blocks(kind: str) -> None:
    if kind == "tokens":
        maker: TokenPrompts | TextPrompts = TokenPrompts(8, "salt")
        other_salt: TokenPrompts | TextPrompts = TokenPrompts(8, "pepper")
    else:
        maker = TextPrompts(8, "salt", tokens_per_word=1.0)
        other_salt = TextPrompts(8, "pepper", tokens_per_word=1.0)

    def words(prompts: TokenPrompts | TextPrompts, of: WorkRequest) -> list[object]:
        made = prompts.prompt(of)
        return [each.rstrip(".") for each in made.split()] if isinstance(made, str) else list(made)

    one = words(maker, request(0, (1, 2, 3)))
    other = words(maker, request(0, (1, 2, 4), tokens=21))
    assert (len(one), len(other)) == (24, 21)
    assert one[:16] == other[:16]
    assert one[16:21] != other[16:]
    assert words(maker, request(0, (1, 2, 3))) == one
    assert words(other_salt, request(0, (1, 2, 3)))[:8] != one[:8]


def test_token_prompts_keep_to_ids_that_every_vocabulary_has() -> None:
    tokens = TokenPrompts(512, "s").prompt(WorkRequest(0, 5120, 1, tuple(range(10)), 0))
    assert FIRST_TOKEN <= min(tokens) <= max(tokens) <= LAST_TOKEN


def test_a_kept_block_takes_little_more_than_its_numbers() -> None:
    maker = TokenPrompts(512, "s")
    tracemalloc.start()
    try:
        for block_id in range(400):
            maker.prompt(WorkRequest(0, 512, 1, (block_id,), 0))
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 400 * 512 < kept_bytes < 400 * 512 * 3


def trace() -> Workload:
    """Two sessions, two requests each, crosswise."""
    return Workload(
        "two",
        8,
        (
            request(10.0, (1,), session=0),
            request(20.0, (2,), session=1),
            request(40.0, (1, 3), session=0),
            request(50.0, (2, 4), session=1),
        ),
    )


def test_a_stretch_begins_at_its_first_arrival_and_a_speedup_squeezes_it() -> None:
    arrivals = schedule(trace(), Stretch(start_s=15, duration_s=30, speedup=2))
    assert [(each.due_s, each.request.session) for each in arrivals] == [(0.0, 1), (10.0, 0)]


def test_whole_sessions_are_those_that_begin_inside_to_their_end() -> None:
    arrivals = schedule(trace(), Stretch(start_s=15, duration_s=30, whole_sessions=True))
    assert [each.request.block_ids for each in arrivals] == [(2,), (2, 4)]


def test_several_answers_to_a_prompt_are_asked_for_at_once() -> None:
    """As many as there were, and each with room for the longest."""
    answers = [replace(request(1.0, (1,), output=length), branch=at) for at, length in enumerate((3, 9, 5))]
    work = Workload("several", 8, (request(0.0, (2,)), *answers, request(2.0, (3,))))
    arrivals = schedule(work, Stretch(max_requests=2))
    assert [(each.due_s, each.n, each.request.output_tokens) for each in arrivals] == [(0, 1, 4), (1, 3, 9)]
    load = Load(shortened(arrivals, max_tokens=None, max_output=8), TokenPrompts(8, ""), Targets())
    one, several = map(load.question, load.arrivals)
    assert (one.num_choices, "n" in one.body) == (1, False)
    assert (several.num_choices, several.body["n"], several.body["max_tokens"]) == (3, 3, 8)


def test_a_stretch_with_nobody_in_it_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="nobody arrives"):
        schedule(trace(), Stretch(start_s=100))


def test_prompts_are_cut_with_their_blocks() -> None:
    (arrival,) = shortened(
        schedule(Workload("one", 8, (request(0, (1, 2, 3, 4), tokens=30, output=9),))),
        max_tokens=20,
        max_output=5,
    )
    assert (arrival.request.input_tokens, arrival.request.output_tokens) == (15, 5)
    assert arrival.request.block_ids == (1, 2)
    with pytest.raises(WorkloadError, match="no room"):
        shortened(schedule(trace()), max_tokens=4, max_output=None)


def test_an_infinite_cache_finds_full_blocks_asked_before_and_never_the_last_token() -> None:
    requests = [request(0, (1, 2)), request(1, (1, 2)), request(2, (1, 2, 3), tokens=20), request(3, (9,))]
    # 8 of 16 (the second block holds the last token), then 16 of 20, then nothing of 8; the first only warms.
    assert infinite_cache_hit_ratio(requests, 8, counted_from=1) == pytest.approx(
        (8 + 16 + 0) / (16 + 20 + 8)
    )
    assert infinite_cache_hit_ratio([], 8) == 0.0


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("system_prompts", 0.80, 0.95),
        ("multi_turn", 0.60, 0.85),
        ("hot_prefix", 0.75, 0.95),
        ("no_reuse", 0.0, 0.0),
        ("decode_heavy", 0.20, 0.70),
        ("agent_loops", 0.80, 0.97),
        ("held_out", 0.70, 0.95),
    ],
)
def test_generators_are_the_same_for_a_seed_and_share_what_they_claim(
    name: str, low: float, high: float
) -> None:
    source = GeneratorSource(make_generator(name, {}))
    window = source.window(5.0, 400, seed=3)
    assert window == source.window(5.0, 400, seed=3)
    assert window != source.window(5.0, 400, seed=4)
    ratio = infinite_cache_hit_ratio(window.requests, window.block_tokens, counted_from=50)
    assert low <= ratio <= high, f"{name}: {ratio:.3f}"
    assert name in GENERATORS


def answer(**changes: object) -> Answer:
    told: dict[str, object] = {
        "sent_s": 0.0,
        "took_s": 2.0,
        "ttft_s": 0.5,
        "gaps_s": (0.1, 0.3),
        "prompt_tokens": 100,
        "cached_tokens": 80,
        "output_tokens": 5,
        "replica": "a",
        "finish_reasons": ("length",),
        "texts": ("x",),
        "status": 200,
    }
    return Answer(**{**told, **changes})  # type: ignore[arg-type]


def test_times_count_from_when_a_request_was_due() -> None:
    """Or a client that is late would make a slow server look fast."""
    tally = Tally(targets=Targets(ttft_s=0.6))
    tally.sent(1.0, 0.2)
    tally.answered(1.0, 0.2, answer())
    assert tally.ttft.quantile_s(1.0) == pytest.approx(0.7, rel=0.01)
    assert tally.late.quantile_s(1.0) == pytest.approx(0.2, rel=0.01)
    assert tally.good == 0


def test_only_what_is_due_after_the_warm_up_counts_and_failures_are_not_good() -> None:
    tally = Tally(targets=Targets(ttft_s=1.0, gap_s=0.2), counted_from_s=2.0)
    for due_s, told in (
        (0.0, answer()),
        (2.0, answer(gaps_s=(0.1,), replica="b")),
        (3.0, answer()),  # a gap too long
        (4.5, answer(failure=Failure.CUT, problem="reset")),
        (6.0, answer(cached_tokens=None, gaps_s=())),
    ):
        tally.sent(due_s, 0.0)
        tally.answered(due_s, 0.0, told)
    assert (tally.due, tally.answers, tally.good, tally.untold) == (4, 3, 2, 1)
    assert tally.failures == {"connection cut": 1}
    assert tally.problems == {"connection cut": ["reset"]}
    assert tally.hit_ratio == pytest.approx(160 / 200)
    assert tally.goodput_per_s == pytest.approx(2 / 4 * 3 / 4.0)  # two of four, which came in three gaps
    assert [each.due for each in tally.bins] == [1, 0, 1, 1, 1, 0, 1]
    assert tally.bins[0].cached_tokens == 80  # over time the warm-up is shown too
    assert tally.imbalance == pytest.approx(20 * 2 / 40)


def test_what_comes_at_one_instant_has_no_goodput() -> None:
    """Good answers, and no time to divide them by: nothing is told rather than 0."""
    tally = Tally()
    for _ in range(3):
        tally.sent(0.0, 0.0)
        tally.answered(0.0, 0.0, answer())
    assert tally.good == 3
    assert math.isnan(tally.goodput_per_s)


def test_memory_does_not_grow_with_requests() -> None:
    """Ten thousand answers within ten seconds: ten bins, and a histogram no longer than its range."""
    tally, rng = Tally(), random.Random(0)
    for index in range(10_000):
        tally.sent(index / 1000, 0.0)
        tally.answered(index / 1000, 0.0, answer(ttft_s=rng.uniform(0.1, 1.0)))
    assert len(tally.bins) == 10
    assert len(tally.ttft.buckets) < 250
